// Use of the cores by this process and by all others, from the kernel's counters.
#pragma once
#include <cstdint>
#include <iosfwd>
#include <utility>
#include <vector>

namespace kvlab {

// The logical CPUs that this process may run on (sched_getaffinity), ascending; not empty.
std::vector<int> allowed_cpus();

// Counters since a fixed moment. The difference of two covers the time between them.
struct CpuUse {
  double wall = 0;  // seconds
  double own = 0;   // seconds of cores that this process used
  double all = 0;   // seconds of our CPUs that anybody used, other guests of the host included; NaN = unknown
  std::int64_t voluntary = 0;    // context switches of this process: it waited for something
  std::int64_t involuntary = 0;  // likewise: another thread took the core
};
CpuUse cpu_use();

// The mean number of our CPUs that other processes used from begin to end; NaN = unknown. /proc/stat counts ticks of
// 10 ms per CPU, so short times tell little.
double other_cores(const CpuUse& begin, const CpuUse& end);

// Seconds that each thread of this process waited for a core, by thread id; empty = unknown.
using ThreadWaits = std::vector<std::pair<int, double>>;
ThreadWaits thread_waits();
// Thread seconds waited from begin to end; NaN = unknown. A thread that has ended before `end` is left out.
double waited(const ThreadWaits& begin, const ThreadWaits& end);

// Ticks in which `cpus` were not idle, from the text of /proc/stat; NaN if it lists none of them.
double busy_ticks(std::istream& proc_stat, const std::vector<int>& cpus);

}  // namespace kvlab
