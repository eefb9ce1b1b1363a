// The first process of a confined program: what it does before the program starts, and after it. The process is a copy
// of one with several threads. So it calls the kernel alone, and every text was made before.
#pragma once
#include <string>
#include <utility>
#include <vector>

namespace kvlab::confine {

inline constexpr const char* base = "/tmp";  // becomes the root, then the current folder
inline constexpr const char* old_root = "/old";
inline constexpr unsigned nobody = 65534;

struct Shown {
  std::string from, to;  // from: below old_root
  bool folder = false;
};

struct Plan {
  std::vector<std::string> folders;                        // made in this order: places of what is shown
  std::vector<Shown> shown;                                // and cannot be written
  std::vector<std::pair<std::string, std::string>> links;  // place and text of symbolic links
  std::string room, user_map, group_map;     // options of the current folder; the maps of a user without root's rights
  std::string program;                       // a path
  std::vector<char*> words, variables;       // as execve wants them
  bool root = false;                         // root's rights are there, and are given up
  int input = -1, output = -1, report = -1;  // descriptors above 9
  unsigned long memory = 0, storage = 0, processes = 0, seconds = 0;
};

enum Step : int { nothing, users, mounts, showing, leaving, rights, limits, calls, child, start };
const char* name_of(int step);

// Reported once. step: what failed, with the error's number as value. Of nothing, value is the program's wait status.
struct Report {
  int step = nothing, value = 0;
};

[[noreturn]] void run(const Plan& plan);

}  // namespace kvlab::confine
