// Runs a program that nobody has read, such as code that a model wrote.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace kvlab {

// The program has namespaces of its own for processes, files, network, and users, and it has no rights. It sees the
// system's programs and libraries, and its own installation: the folder above its `bin`, or its file alone where that
// folder is a user's home. It can write none of them. Its current folder, /tmp, is empty and lies in memory. It has no
// socket to anything outside. Its variables are these alone.
struct ConfinedProgram {
  std::vector<std::string> words;  // [0]: a path, or a program of PATH
  std::string input{};             // its standard input
  std::map<std::string, std::string> variables{};
  double seconds = 10;                           // of wall time, after which all of its processes end
  std::int64_t memory = std::int64_t{1} << 30;   // bytes of address space of each, so `processes` times that of all
  std::int64_t storage = std::int64_t{1} << 26;  // bytes in its current folder
  int processes = 16;                            // at most, threads included
};

struct ConfinedEnd {
  bool late = false;         // it was ended after `seconds`, of which kvlab warns
  int code = 0, signal = 0;  // signal: what ended it; 0 = it ended by itself
  std::string said{};        // the last 64 KiB of both outputs
};

// Throws Errc::unsupported where this machine cannot confine a program, and Errc::io where the program cannot be
// started. It never runs otherwise.
ConfinedEnd run_confined(const ConfinedProgram& program);

}  // namespace kvlab
