// Starts programs and waits for them. One that nobody has read is started by <kvlab/confined.hpp>.
#pragma once
#include <sys/types.h>

#include <chrono>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace kvlab {

using Environment = std::map<std::string, std::string>;  // variables in place of this process's

struct ProgramStart {
  std::string file;  // "" = words[0]
  Environment set{};
  bool reads = false;  // this process's input; else it reads nothing
  // A signal that it gets when the thread that started it ends, however that ends. A program that cannot be started
  // then ends with 127.
  int at_our_end = 0;
  std::vector<std::pair<int, int>> descriptors{};  // of this process, and the program's number for it
};
// Starts a path or a program of PATH with the words as its arguments; words[0] is its name. Throws Errc::io where it
// cannot be started.
pid_t start_program(std::vector<std::string> words, const ProgramStart& how = {});

// The end of a program that was waited for. signal: what ended it; 0 = it ended by itself.
struct ProgramEnd {
  int code = 0, signal = 0;
  std::string said;     // by run_program: both of its outputs
  bool in_time = true;  // false: run_program ended it at the limit
  bool good() const { return code == 0 && signal == 0; }
};
// limit: how long it may run; 0 = as long as it likes.
ProgramEnd run_program(const std::vector<std::string>& words, std::chrono::seconds limit = {});

// The file that starts under the name: a path itself, else in a folder of PATH. "" = there is none.
std::string path_of_program(const std::string& name);

// As execve wants them. They point into the texts.
std::vector<char*> pointers(std::vector<std::string>& texts);

ProgramEnd wait_for(pid_t program);

// Whether the process has ended; it is then waited for.
bool has_ended(pid_t process, ProgramEnd& end);

std::string shell_quoted(const std::string& word);
std::string shell_quoted(const std::vector<std::string>& words);

}  // namespace kvlab
