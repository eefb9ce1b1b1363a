// The one door for everything that kvlab says beside its results: errors, warnings, notes, progress. It writes to
// stderr and, after start() with a file, to that file with times. Text may come from anywhere (plugins, file names):
// control characters are written as \x1b and the like (printable() of base/text.hpp). All functions may be called from
// any thread, also before start().
//
// libkvlab_cuda.so does not link to this: its host code calls cuda::warn (base/cuda_warn.hpp).
#pragma once
#include <chrono>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvlab::log {

enum class Level { debug, info, warning, error, off };

// The variable KVLAB_LOG names it: debug, info, warning, error or off. Without the variable it is info. Another word is
// Errc::config.
Level level_of_environment();

struct Settings {
  Level level = Level::info;  // stderr shows this level and those above it
  std::string file;           // it is appended to and takes all levels; empty: no file
};

// Errc::io where the file cannot be opened, is no regular file, or holds something that is no log of kvlab.
void start(const Settings& settings);

void debug(std::string_view text);  // what was found, chosen and loaded, and how long it took
void info(std::string_view text);   // a note or progress; stderr shows it without a level in front
// Something makes a result worth less, or surprises. A text is shown once per process, but every Collected hears it
// again. So callers warn wherever it is true, not once.
void warn(std::string_view text);
void error(std::string_view text);

// Rewrites the last line of a terminal, "" = takes it away; messages appear above it. It does nothing where stderr is
// no terminal or hides notes.
void status(std::string_view line);

// Says at its end, as a debug message, how long it has lived: "weights of x: 12 ms".
class Timed {
 public:
  explicit Timed(std::string what) : what_(std::move(what)) {}
  ~Timed();
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  std::string what_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Gathers the warnings that are said while it lives, by any thread, whether they are shown or not.
class Collected {
 public:
  Collected();
  ~Collected();
  Collected(const Collected&) = delete;
  Collected& operator=(const Collected&) = delete;

  std::vector<std::string> warnings() const;  // each text once, in the order in which they were first said

 private:
  friend void warn(std::string_view text);
  std::vector<std::string> warnings_;
};

}  // namespace kvlab::log
