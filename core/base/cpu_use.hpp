// Who used the cores: this process and all others, by the kernel's counters.
#pragma once
#include <cstdint>
#include <iosfwd>
#include <utility>
#include <vector>

namespace kvlab {

// The logical CPUs that this process may run on (sched_getaffinity), ascending; not empty.
std::vector<int> allowed_cpus();

// Counters since some fixed moment. Two of them tell what happened in between.
struct CpuUse {
  double wall = 0;  // seconds
  double own = 0;   // seconds of cores that this process used
  double all = 0;   // seconds of our CPUs that anybody used, other guests of the host included; NaN = unknown
  std::int64_t voluntary = 0;    // context switches of this process: it waited for something
  std::int64_t involuntary = 0;  // another one took the core
};
CpuUse cpu_use();

// The mean number of our CPUs that others used in between, 0 or more; NaN = unknown. /proc/stat counts in ticks of
// 10 ms per CPU: short times tell little.
double other_cores(const CpuUse& begin, const CpuUse& end);

// Seconds in which each thread of this process could run and had no core, by thread; empty = unknown.
using ThreadWaits = std::vector<std::pair<int, double>>;
ThreadWaits thread_waits();
// Their sum in between, in thread seconds; NaN = unknown. A thread that has ended meanwhile is left out.
double waited(const ThreadWaits& begin, const ThreadWaits& end);

// Ticks of the CPUs named in which they were not idle, from the text of /proc/stat; NaN when it has none of them.
double busy_ticks(std::istream& proc_stat, const std::vector<int>& cpus);

}  // namespace kvlab
