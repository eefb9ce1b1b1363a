#include "run/disturbance.hpp"

#include <cstdlib>

#include <algorithm>

#include "base/threads.hpp"

namespace kvlab {

bool disturbed(const Disturbance& d) {
  constexpr double share_of_core = 0.1, ticks = 0.03, share_of_time = 0.05;
  const double taken = std::max(0., d.other_cores - (d.cores - d.needed));
  if (taken > share_of_core && taken * d.seconds > ticks) return true;
  return d.waiting_threads > share_of_time;
}

TimedPart::TimedPart(Device device)
    : device_(device), threads_(all_threads()), begin_(cpu_use()), waits_(thread_waits()) {
  fewest_threads();
}

void TimedPart::note(results::SummaryRow& row) const {
  const CpuUse end = cpu_use();
  Disturbance d;
  d.seconds = end.wall - begin_.wall;
  d.other_cores = other_cores(begin_, end);
  d.waiting_threads = waited(waits_, thread_waits()) / d.seconds;
  d.cores = static_cast<int>(allowed_cpus().size());
  d.needed = device_ == Device::cpu ? std::min(threads_, d.cores) : 1;  // one thread feeds a GPU
  double load = results::not_measured;
  if (getloadavg(&load, 1) == 1) row.load = load;
  row.other_cores = d.other_cores;
  row.waiting_threads = d.waiting_threads;
  row.involuntary_switches = end.involuntary - begin_.involuntary;
  row.voluntary_switches = end.voluntary - begin_.voluntary;
  row.threads = fewest_threads();
  if (disturbed(d)) results::add_label(row, "disturbed");
}

}  // namespace kvlab
