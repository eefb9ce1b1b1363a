// Did other processes lengthen a cell's times? TimedPart notes the machine's load during a cell's timed part and sets
// the label `disturbed`. --strict then runs the cell again.
#pragma once
#include <functional>
#include <kvlab/stream.hpp>
#include "base/cpu_use.hpp"
#include "result/results.hpp"

namespace kvlab {

// NaN = unknown.
struct Disturbance {
  double seconds = 0;          // of the timed part
  double other_cores = 0;      // mean number of our cores that other processes used
  double waiting_threads = 0;  // mean number of our threads that could run and had no core
  int cores = 1;               // that we may use
  int needed = 1;              // cores that the timed part uses when it is alone
};

// The criterion of the label. One of the two is enough:
// - Other processes used more than a tenth of a core that we needed. All threads of a step wait for the last one, so a
//   tenth of one core lengthens times by a tenth. A machine's own housekeeping uses a few hundredths.
// - Our threads waited for a core in more than a twentieth of the time. This also sees times that are too short for
//   the first: less than three ticks of the counters, 30 ms.
bool disturbed(const Disturbance& d);

// A cell's timed part: it begins with this object and ends with note().
class TimedPart {
 public:
  explicit TimedPart(Device device);
  // Fills the row's columns of load, switches, threads and clocks, and adds the label.
  void note(results::SummaryRow& row) const;

 private:
  Device device_;
  int threads_;
  double cpu_mhz_, gpu_mhz_;
  CpuUse begin_;
  ThreadWaits waits_;
};

// --strict runs a cell again at most so often.
inline constexpr int most_reruns = 3;
// Runs a cell, and again while other processes disturbed it. Returns the last result, with SummaryRow::reruns.
results::CellResult run_until_quiet(const std::function<results::CellResult()>& run);
// How often a cell was run again, for people: "" or ", run again once, and still disturbed".
std::string reruns_text(const results::SummaryRow& row);

}  // namespace kvlab
