#include "run/disturbance.hpp"

#include <fmt/format.h>

#include <cstdlib>

#include <algorithm>

#include "base/clock_rates.hpp"
#include "base/log.hpp"
#include "base/threads.hpp"
#include "run/gpus.hpp"

namespace kvlab {
namespace {

double gpu_mhz(Device device) {
  if (device != Device::cuda) return results::not_measured;
  static const GpuClock clock(gpu_uuid());
  return clock.mhz();
}

}  // namespace

bool disturbed(const Disturbance& d) {
  constexpr double share_of_core = 0.1, ticks = 0.03, share_of_time = 0.05;
  const double taken = std::max(0., d.other_cores - (d.cores - d.needed));
  if (taken > share_of_core && taken * d.seconds > ticks) return true;
  return d.waiting_threads > share_of_time;
}

TimedPart::TimedPart(Device device)
    : device_(device),
      threads_(all_threads()),
      cpu_mhz_(cpu_mhz()),
      gpu_mhz_(gpu_mhz(device)),
      begin_(cpu_use()),
      waits_(thread_waits()) {
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
  row.cpu_mhz_begin = cpu_mhz_;
  row.gpu_mhz_begin = gpu_mhz_;
  row.cpu_mhz_end = cpu_mhz();
  row.gpu_mhz_end = gpu_mhz(device_);
  if (disturbed(d)) results::add_label(row, "disturbed");
}

results::CellResult run_until_quiet(const std::function<results::CellResult()>& run) {
  for (int reruns = 0;; ++reruns) {
    results::CellResult result = run();
    result.summary.reruns = reruns;
    if (result.summary.status != "ok" || !results::has_label(result.summary, "disturbed") || reruns == most_reruns)
      return result;
    log::info(fmt::format("cell {}: other processes disturbed its times, it runs again ({} of at most {} times)",
                          result.id, reruns + 1, most_reruns));
  }
}

std::string reruns_text(const results::SummaryRow& row) {
  if (row.reruns <= 0) return "";
  const std::string times = row.reruns == 1 ? "once" : fmt::format("{} times", row.reruns);
  const bool still = row.status == "ok" && results::has_label(row, "disturbed");
  return fmt::format(", run again {}{}", times, still ? ", and still disturbed" : "");
}

}  // namespace kvlab
