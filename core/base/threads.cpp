#include "base/threads.hpp"

#include <omp.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <string>
#include <system_error>
#include <utility>

#include "base/cpu_use.hpp"

namespace kvlab {
namespace {

namespace fs = std::filesystem;

constexpr double unlimited = std::numeric_limits<double>::infinity();
constexpr std::chrono::milliseconds window(250);  // between two looks at the load: 25 ticks of /proc/stat

// quota / period of a cgroup's folder, v2 (cpu.max) or v1 (cpu.cfs_*).
double limit_of(const fs::path& folder) {
  double quota = -1, period = 0;
  if (std::ifstream both(folder / "cpu.max"); both) {
    both >> quota >> period;  // "max 100000" has no number first
    return both && quota > 0 && period > 0 ? quota / period : unlimited;
  }
  std::ifstream(folder / "cpu.cfs_quota_us") >> quota;
  std::ifstream(folder / "cpu.cfs_period_us") >> period;
  return quota > 0 && period > 0 ? quota / period : unlimited;
}

// The least limit of a group and all above it. In a container the path may be the host's; then only the mount exists.
double limit_up_from(const fs::path& mount, const fs::path& group) {
  double least = limit_of(mount);
  fs::path folder = mount;
  for (const fs::path& name : group.relative_path()) least = std::min(least, limit_of(folder /= name));
  return least;
}

struct Team {
  bool follows = false;  // its size adapts to the load
  int most = 0, fewest = std::numeric_limits<int>::max();
  std::chrono::steady_clock::time_point looked;
  CpuUse last;
};
Team& team() {
  static Team one;
  return one;
}

void set_threads(int count) {
  omp_set_num_threads(count);
  team().fewest = std::min(team().fewest, count);
}

// Names the process like its file: after an exec of /proc/self/exe it is "exe", which pgrep and top do not find.
void name_process() {
  std::error_code error;
  const std::string name = fs::read_symlink("/proc/self/exe", error).filename();
  if (!error) prctl(PR_SET_NAME, name.c_str());
}

}  // namespace

void prefer_short_spins(char** argv) {
  name_process();
  if (std::getenv("OMP_WAIT_POLICY") || std::getenv("GOMP_SPINCOUNT")) return;
  setenv("GOMP_SPINCOUNT", "10000", 1);
  execv("/proc/self/exe", argv);  // returns only when it failed: then the default stays
}

double cgroup_cpus(const fs::path& root) {
  double least = unlimited;
  std::ifstream file(root / "proc/self/cgroup");
  const fs::path mounts = root / "sys/fs/cgroup";
  for (std::string line; std::getline(file, line);) {  // ID:CONTROLLERS:PATH, v2 without controllers
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",",
                      group = line.substr(second + 1);
    if (controllers == ",,") {
      least = std::min(least, limit_up_from(mounts, group));
      least = std::min(least, limit_up_from(mounts / "unified", group));
    } else if (controllers.find(",cpu,") != std::string::npos) {
      least = std::min(least, limit_up_from(mounts / "cpu", group));
    }
  }
  return least;
}

int usable_cores(const fs::path& root) {
  const double cores = std::min(static_cast<double>(allowed_cpus().size()), cgroup_cpus(root));
  return std::max(1, static_cast<int>(cores));
}

int most_threads() { return std::max(16, 4 * usable_cores()); }

void use_threads(int wanted) {
  Team& t = team();
  const bool chosen = wanted > 0 || std::getenv("OMP_NUM_THREADS");
  t.follows = !chosen;
  t.most = wanted > 0 ? wanted : chosen ? omp_get_max_threads() : usable_cores();
  t.looked = std::chrono::steady_clock::now();
  t.last = cpu_use();
  set_threads(t.most);
}

int all_threads() { return team().most > 0 ? team().most : omp_get_max_threads(); }

int threads_for(double free_cores, int now, int most) {
  const int fewer = static_cast<int>(std::floor(free_cores + 0.5)),
            more = static_cast<int>(std::floor(free_cores + 0.25));
  return std::clamp(now > fewer ? fewer : std::max(now, more), 1, most);
}

void follow_load() {
  Team& t = team();
  if (!t.follows || t.most <= 1) return;
  if (std::chrono::steady_clock::now() - t.looked < window) return;
  t.looked = std::chrono::steady_clock::now();
  follow_load(cpu_use());
}

void follow_load(const CpuUse& now) {
  Team& t = team();
  if (!t.follows) return;
  const double others = other_cores(t.last, now);
  t.last = now;
  if (std::isfinite(others))
    set_threads(threads_for(static_cast<double>(allowed_cpus().size()) - others, omp_get_max_threads(), t.most));
}

int fewest_threads() {
  return std::min(std::exchange(team().fewest, std::numeric_limits<int>::max()), omp_get_max_threads());
}

AllThreads::AllThreads() : now_(omp_get_max_threads()) {
  if (team().follows) omp_set_num_threads(team().most);
}
AllThreads::~AllThreads() { omp_set_num_threads(now_); }

}  // namespace kvlab
