// How many OpenMP threads work, and how they wait for each other. Results do not depend on either.
//
// After a fork: libgomp's threads do not exist in the child, and a parallel region there hangs if the parent has run
// one. A child that computes must exec first (the settings below are in its environment then).
#pragma once
#include <filesystem>

namespace kvlab {

struct CpuUse;

// Waiting OpenMP threads spin briefly and then sleep. The runtime's own default spins for milliseconds. A busy machine
// pays for that in each of many short parallel regions. libgomp reads its settings when it is loaded, so the program
// starts itself again with them, under its own name. It does nothing when the user has chosen (OMP_WAIT_POLICY,
// GOMP_SPINCOUNT). Call it first in main.
void prefer_short_spins(char** argv);

// How many CPUs this process may use, at least 1: its affinity's, and at most a cgroup's quota (v1 or v2) in whole
// CPUs. Logical CPUs count: virtual machines show cores as siblings and siblings as cores. root: of cgroup_cpus.
int usable_cores(const std::filesystem::path& root = "/");

// More threads than this are a mistake: four for each usable core, at least 16.
int most_threads();

// Sets how many threads work. 0 means OMP_NUM_THREADS where it is set. Otherwise it means as many as cores are free to
// us: usable_cores(), and fewer while other processes use them (follow_load). Threads meet many times in a decode step.
// One that waits for a core holds all others up, so fewer threads are faster when each has its core.
void use_threads(int wanted);

// Between steps: adapts the number of threads to what others use of our cores, where use_threads(0) left it to us.
// Looks a few times a second; does nothing before use_threads was called.
void follow_load();
// The same at once, by these counters: for tests.
void follow_load(const CpuUse& now);

// The threads that work when nobody else does.
int all_threads();

// The fewest threads that worked since the latest call, this moment's included.
int fewest_threads();

// While it lives all threads of use_threads work, whatever the load: for code that lays out work by their number.
class AllThreads {
 public:
  AllThreads();
  ~AllThreads();
  AllThreads(const AllThreads&) = delete;
  AllThreads& operator=(const AllThreads&) = delete;

 private:
  int now_;
};

// How many threads for so many free cores, `now` at work and `most` at most. A machine whose load swings by half a core
// leaves the number as it is.
int threads_for(double free_cores, int now, int most);

// CPUs that the cgroup of this process may use, from `root`/proc/self/cgroup and `root`/sys/fs/cgroup; infinite = no
// limit. The strictest limit on the way up counts.
double cgroup_cpus(const std::filesystem::path& root = "/");

}  // namespace kvlab
