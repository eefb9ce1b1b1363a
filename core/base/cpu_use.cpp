#include "base/cpu_use.hpp"

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <istream>
#include <limits>
#include <sstream>
#include <string>
#include <thread>

namespace kvlab {
namespace {

constexpr double unknown = std::numeric_limits<double>::quiet_NaN();

}  // namespace

std::vector<int> allowed_cpus() {
  std::vector<int> out;
  for (int room = CPU_SETSIZE; room <= 64 * CPU_SETSIZE && out.empty(); room *= 4) {  // EINVAL: room is too small
    cpu_set_t* set = CPU_ALLOC(static_cast<std::size_t>(room));
    const std::size_t bytes = CPU_ALLOC_SIZE(static_cast<std::size_t>(room));
    if (sched_getaffinity(0, bytes, set) == 0)
      for (int cpu = 0; cpu < room; ++cpu)
        if (CPU_ISSET_S(static_cast<std::size_t>(cpu), bytes, set)) out.push_back(cpu);
    CPU_FREE(set);
  }
  if (out.empty())
    for (int cpu = 0; cpu < static_cast<int>(std::max(1u, std::thread::hardware_concurrency())); ++cpu)
      out.push_back(cpu);
  return out;
}

double busy_ticks(std::istream& proc_stat, const std::vector<int>& cpus) {
  double sum = 0;
  bool any = false;
  for (std::string line; std::getline(proc_stat, line);) {
    if (line.rfind("cpu", 0) != 0) break;  // the lines of CPUs come first
    int cpu = -1;
    const auto [end, error] = std::from_chars(line.data() + 3, line.data() + line.size(), cpu);
    if (error != std::errc() || !std::binary_search(cpus.begin(), cpus.end(), cpu)) continue;
    std::istringstream fields(line.substr(static_cast<std::size_t>(end - line.data())));
    // user nice system idle iowait irq softirq steal; guests are part of user and nice.
    double ticks = 0;
    for (int field = 0; field < 8 && fields >> ticks; ++field)
      if (field != 3 && field != 4) sum += ticks;
    any = true;
  }
  return any ? sum : unknown;
}

CpuUse cpu_use() {
  CpuUse use;
  std::ifstream stat("/proc/stat");
  use.all = busy_ticks(stat, allowed_cpus()) / static_cast<double>(sysconf(_SC_CLK_TCK));
  timespec own{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &own);
  use.own = static_cast<double>(own.tv_sec) + 1e-9 * static_cast<double>(own.tv_nsec);
  use.wall = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  use.voluntary = usage.ru_nvcsw;
  use.involuntary = usage.ru_nivcsw;
  return use;
}

double other_cores(const CpuUse& begin, const CpuUse& end) {
  const double wall = end.wall - begin.wall;
  if (!(wall > 0)) return unknown;
  const double others = (end.all - begin.all) - (end.own - begin.own);
  return others < 0 ? 0 : others / wall;  // below 0: ticks are coarser than our own clock
}

ThreadWaits thread_waits() {
  ThreadWaits out;
  std::error_code error;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", error)) {
    std::ifstream file(task.path() / "schedstat");
    double ran = 0, waited = 0;  // ns
    if (file >> ran >> waited) out.emplace_back(std::atoi(task.path().filename().c_str()), 1e-9 * waited);
  }
  std::sort(out.begin(), out.end());
  return out;
}

double waited(const ThreadWaits& begin, const ThreadWaits& end) {
  if (begin.empty() || end.empty()) return unknown;
  double sum = 0;
  for (const auto& [thread, seconds] : end) {
    const auto at = std::lower_bound(begin.begin(), begin.end(), std::pair<int, double>(thread, 0));
    const double before = at != begin.end() && at->first == thread ? at->second : 0;
    sum += std::max(0., seconds - before);
  }
  return sum;
}

}  // namespace kvlab
