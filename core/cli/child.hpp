// Child processes of the command line.
#pragma once
#include <sys/types.h>

#include <string>
#include <vector>

namespace kvlab {

// Starts words[0], a path or a program of PATH. out: takes its standard output; -1 = ours does. Errc::io if it cannot
// be started.
pid_t start_child(std::vector<std::string> words, int out = -1);

struct ChildEnd {
  int code = 0, signal = 0;  // signal: what ended it; 0 = it ended by itself
  bool good() const { return code == 0 && signal == 0; }
};

ChildEnd wait_for(pid_t child);

}  // namespace kvlab
