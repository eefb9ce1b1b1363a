// Starts programs and waits for them.
#pragma once
#include <sys/types.h>

#include <map>
#include <string>
#include <vector>

namespace kvlab {

using Environment = std::map<std::string, std::string>;  // variables in place of this process's

// Starts `file`, a path or a program of PATH, with the words as its arguments; words[0] is its name. It reads nothing.
// Throws Errc::io where it cannot be started.
pid_t start_program(const std::string& file, std::vector<std::string> words, const Environment& set = {}, int out = -1);

// The end of a program that was waited for. signal: what ended it; 0 = it ended by itself.
struct ProgramEnd {
  int code = 0, signal = 0;
  std::string said;  // both of its outputs
};
ProgramEnd run_program(const std::vector<std::string>& words);

// Whether the process has ended; it is then waited for.
bool has_ended(pid_t process, ProgramEnd& end);

std::string shell_quoted(const std::vector<std::string>& words);

}  // namespace kvlab
