// Progress through base/log.hpp: a line that is rewritten on a terminal, and a line per finished cell.
#pragma once
#include <chrono>
#include <string>

namespace kvlab {

class Progress {
 public:
  explicit Progress(int cells, bool shown = true);
  ~Progress();

  void skip();  // a cell that is finished already
  void begin(const std::string& name);
  void item(const std::string& pass, int done, int total);
  void end(const std::string& outcome);  // "ok", "ok, ...", or an error: "failed: ...", "oom: ..."

  // Of cells that other processes run.
  void waiting(std::size_t running, const std::string& where);
  void ended_elsewhere(const std::string& name, const std::string& outcome);

 private:
  using Clock = std::chrono::steady_clock;
  std::string eta(double part_of_cell) const;

  void say(const std::string& line, const std::string& outcome) const;

  int cells_, done_ = 0, skipped_ = 0;
  bool shown_;
  std::string name_;
  Clock::time_point start_ = Clock::now(), cell_start_ = start_, drawn_{};
};

// "8 s", "2 min 05 s", "1 h 02 min".
std::string duration_text(double seconds);

}  // namespace kvlab
