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

// The level that the variable KVLAB_LOG names: debug, info, warning, error or off; info without the variable. Another
// word is Errc::config.
Level level_of_environment();

struct Settings {
  Level level = Level::info;  // stderr shows this level and those above it
  std::string file;           // it is appended to and takes all levels; empty: no file
};

// Errc::io where the file cannot be opened, is no regular file, or holds something that is no log of kvlab.
void start(const Settings& settings);

void debug(std::string_view text);  // a finding, a choice or a load, with its time
void info(std::string_view text);   // a note or progress; stderr shows it without a level in front
// For anything that makes a result worth less, or surprises. A text is shown once per process, but every Collected gets
// it again. So callers warn each time, not once.
void warn(std::string_view text);
void error(std::string_view text);

// Rewrites the terminal's last line; "" erases it. Messages appear above it. It does nothing if stderr is no terminal
// or hides notes.
void status(std::string_view line);

// Its destructor logs at level debug how long it has lived: "weights of x: 12 ms".
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

// Gathers the warnings of all threads while it lives, whether they are shown or not.
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

// While it lives, warnings of its thread are neither shown nor gathered: for trials of what is not run in the end.
class Muted {
 public:
  Muted();
  ~Muted();
  Muted(const Muted&) = delete;
  Muted& operator=(const Muted&) = delete;
};

}  // namespace kvlab::log
