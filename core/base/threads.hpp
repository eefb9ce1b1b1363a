// How many OpenMP threads work, and how they wait for each other. Results do not depend on either.
//
// libgomp's threads do not survive a fork: a parallel region in the child hangs if the parent has run one. A child that
// computes must exec first; its environment has the settings below.
#pragma once
#include <filesystem>

namespace kvlab {

struct CpuUse;

// Makes waiting OpenMP threads spin briefly and then sleep. By default they spin for milliseconds, which costs a busy
// machine time in each of many short parallel regions. libgomp reads its settings when it is loaded, so the program
// starts itself again with them, under its own name. A choice of the user (OMP_WAIT_POLICY, GOMP_SPINCOUNT) stays. Call
// it first in main.
void prefer_short_spins(char** argv);

// The number of CPUs that this process may use: those of its affinity, at most its cgroup's quota (v1 or v2) in whole
// CPUs. At least 1. These are logical CPUs, because virtual machines show cores as siblings and siblings as cores.
// root: as in cgroup_cpus.
int usable_cores(const std::filesystem::path& root = "/");

// More threads than this are a mistake: four for each usable core, at least 16.
int most_threads();

// Sets how many threads work. 0 means OMP_NUM_THREADS if that is set, else usable_cores(), and fewer while other
// processes use them (follow_load). Threads meet many times in a decode step. One that waits for a core holds up all
// others, so fewer threads are faster when each has its core.
void use_threads(int wanted);

// Called between steps. It adapts the number of threads to the cores that others use, if use_threads(0) left it to us.
// It looks a few times a second and does nothing before use_threads was called.
void follow_load();
// For tests: the same at once, from these counters.
void follow_load(const CpuUse& now);

// The number of threads that work when no other process does.
int all_threads();

// The fewest threads that worked since the last call of this function, those of now included.
int fewest_threads();

// While it lives all_threads() threads work, whatever the load, for code that divides work by their number.
class AllThreads {
 public:
  AllThreads();
  ~AllThreads();
  AllThreads(const AllThreads&) = delete;
  AllThreads& operator=(const AllThreads&) = delete;

 private:
  int now_;
};

// The number of threads for `free_cores`, from 1 to `most`, when `now` threads work. A load that swings by half a core
// does not change the number.
int threads_for(double free_cores, int now, int most);

// CPUs that the cgroup of this process may use, from `root`/proc/self/cgroup and `root`/sys/fs/cgroup; infinite = no
// limit. The strictest limit on the way up counts.
double cgroup_cpus(const std::filesystem::path& root = "/");

}  // namespace kvlab
