// Progress on stderr: one line that is rewritten on a terminal, a line per finished cell in a pipe.
#pragma once
#include <chrono>
#include <string>

namespace kvlab {

class Progress {
 public:
  Progress(int cells, bool quiet);
  ~Progress();

  void skip();  // a cell that is finished already
  void begin(const std::string& name);
  void item(const std::string& pass, int done, int total);
  void end(const std::string& outcome);  // "ok", "failed: ...", "oom: ..."
  void note(const std::string& line);

 private:
  using Clock = std::chrono::steady_clock;
  std::string eta(double part_of_cell) const;
  void clear_line();

  int cells_, done_ = 0, skipped_ = 0;
  bool quiet_, terminal_;
  std::string name_;
  Clock::time_point start_ = Clock::now(), cell_start_ = start_, drawn_{};
};

// "8 s", "2 min 05 s", "1 h 02 min".
std::string duration_text(double seconds);

}  // namespace kvlab
