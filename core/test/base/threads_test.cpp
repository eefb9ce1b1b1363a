#include "base/threads.hpp"

#include <omp.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "base/cpu_use.hpp"

using namespace kvlab;
namespace fs = std::filesystem;

namespace {

// A folder that looks like / to cgroup_cpus.
struct Root {
  fs::path path = fs::temp_directory_path() / ("kvlab_cgroup_" + std::to_string(getpid()));
  Root() { fs::create_directories(path / "proc/self"); }
  ~Root() { fs::remove_all(path); }
  void write(const fs::path& file, const std::string& text) const {
    fs::create_directories((path / file).parent_path());
    std::ofstream(path / file) << text;
  }
};

}  // namespace

TEST_CASE("a cgroup's quota is read where v1 and v2 keep it; the strictest group on the way up counts") {
  const Root root;
  CHECK(std::isinf(cgroup_cpus(root.path)));
  SECTION("v2") {
    root.write("proc/self/cgroup", "0::/a/b\n");
    root.write("sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
    CHECK(std::isinf(cgroup_cpus(root.path)));
    root.write("sys/fs/cgroup/a/b/cpu.max", "400000 100000\n");
    CHECK(cgroup_cpus(root.path) == 4);
    root.write("sys/fs/cgroup/a/cpu.max", "150000 100000\n");
    CHECK(cgroup_cpus(root.path) == 1.5);
    root.write("sys/fs/cgroup/a/b/cpu.max", "10000 20000\n");
    CHECK(cgroup_cpus(root.path) == 0.5);
  }
  SECTION("v2 in a container, where the path is the host's") {
    root.write("proc/self/cgroup", "0::/host/only\n");
    root.write("sys/fs/cgroup/cpu.max", "300000 100000\n");
    CHECK(cgroup_cpus(root.path) == 3);
  }
  SECTION("v1") {
    root.write("proc/self/cgroup", "3:cpuset:/\n2:cpu,cpuacct:/box\n1:name=systemd:/\n");
    root.write("sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "-1\n");
    root.write("sys/fs/cgroup/cpu/box/cpu.cfs_period_us", "100000\n");
    CHECK(std::isinf(cgroup_cpus(root.path)));
    root.write("sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "250000\n");
    CHECK(cgroup_cpus(root.path) == 2.5);
  }
  SECTION("v1 and v2 side by side") {
    root.write("proc/self/cgroup", "1:cpu:/\n0::/\n");
    root.write("sys/fs/cgroup/unified/cpu.max", "500000 100000\n");
    CHECK(cgroup_cpus(root.path) == 5);
    root.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "200000\n");
    root.write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
    CHECK(cgroup_cpus(root.path) == 2);
  }
  SECTION("what is no quota is no limit") {
    root.write("proc/self/cgroup", "0::/a\nnonsense\n");
    for (const char* text : {"", "nonsense", "0 100000", "100000 0", "-5 100000"}) {
      root.write("sys/fs/cgroup/a/cpu.max", text);
      CHECK(std::isinf(cgroup_cpus(root.path)));
    }
  }
}

TEST_CASE("no more cores are usable than the affinity allows") {
  cpu_set_t before;
  REQUIRE(sched_getaffinity(0, sizeof before, &before) == 0);
  CHECK(static_cast<int>(allowed_cpus().size()) == CPU_COUNT(&before));
  CHECK(usable_cores() >= 1);
  CHECK(usable_cores() <= CPU_COUNT(&before));
  CHECK(most_threads() >= 4 * usable_cores());
  const int first = allowed_cpus().front();
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  REQUIRE(sched_setaffinity(0, sizeof one, &one) == 0);
  CHECK(allowed_cpus() == std::vector<int>{first});
  CHECK(usable_cores() == 1);
  REQUIRE(sched_setaffinity(0, sizeof before, &before) == 0);
}

TEST_CASE("a cgroup's quota counts in whole cores, and at least one") {
  const Root root;
  root.write("proc/self/cgroup", "0::/\n");
  const auto with_quota = [&](int thousandths) {
    root.write("sys/fs/cgroup/cpu.max", std::to_string(thousandths) + " 1000\n");
    return usable_cores(root.path);
  };
  const int allowed = static_cast<int>(allowed_cpus().size());
  CHECK(with_quota(500) == 1);
  CHECK(with_quota(1000) == 1);
  CHECK(with_quota(1500) == 1);
  CHECK(with_quota(1999) == 1);
  CHECK(with_quota(2000) == std::min(2, allowed));
  CHECK(with_quota(1000 * allowed + 999) == allowed);
}

TEST_CASE("threads follow the cores that are free, and half a core of noise moves nothing") {
  CHECK(threads_for(2.0, 2, 2) == 2);
  CHECK(threads_for(1.6, 2, 2) == 2);
  CHECK(threads_for(1.4, 2, 2) == 1);  // another process has one of two cores
  CHECK(threads_for(0.7, 2, 2) == 1);  // two processes use both
  CHECK(threads_for(0.0, 1, 2) == 1);
  CHECK(threads_for(1.4, 1, 2) == 1);
  CHECK(threads_for(1.6, 1, 2) == 1);
  CHECK(threads_for(1.9, 1, 2) == 2);  // the others ended
  CHECK(threads_for(64, 2, 2) == 2);   // never more than wanted
  CHECK(threads_for(61.1, 64, 64) == 61);
  CHECK(threads_for(63.9, 61, 64) == 64);
  for (double free = 0; free <= 8; free += 0.01) {  // one change reaches a fixed point
    const int now = threads_for(free, 8, 8);
    CHECK(threads_for(free, now, 8) == now);
  }
}

TEST_CASE("a number of threads that was asked for stays; the plan of all threads is undisturbed by fewer") {
  const int before = omp_get_max_threads();
  use_threads(3);
  CHECK(omp_get_max_threads() == 3);
  CHECK(all_threads() == 3);
  follow_load();
  CHECK(omp_get_max_threads() == 3);
  fewest_threads();
  CHECK(fewest_threads() == 3);
  { const AllThreads all; }
  CHECK(omp_get_max_threads() == 3);
  use_threads(before);
}

TEST_CASE("where the number of threads is ours, it follows what others use of our cores") {
  if (std::getenv("OMP_NUM_THREADS") || usable_cores() < 2) return;
  const int before = omp_get_max_threads();
  use_threads(0);
  const int all = all_threads();
  CHECK(all == usable_cores());
  CHECK(omp_get_max_threads() == all);
  CpuUse now = cpu_use();
  now.wall += 100, now.all += 100. * static_cast<double>(allowed_cpus().size());  // others have every core
  follow_load(now);
  CHECK(omp_get_max_threads() == 1);
  now.wall += 100, now.own += 100, now.all += 100;  // nobody else works
  follow_load(now);
  CHECK(omp_get_max_threads() == all);
  now.wall += 100, now.all = NAN;  // unknown
  follow_load(now);
  CHECK(omp_get_max_threads() == all);
  use_threads(before);
}
