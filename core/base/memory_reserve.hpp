// A reserve of memory, so that a process that runs out of it (ulimit -v, a limit of its data) still ends with a result.
#pragma once
#include <atomic>

namespace kvlab {

namespace detail {
extern std::atomic<bool> reserve_used;
[[noreturn]] void no_reserve();
}  // namespace detail

// Sets 16 MiB aside, and again after they were used. operator new frees them when it finds no memory. A small
// allocation in a parallel region, which no exception may leave, then succeeds. False: the system has no such memory.
bool keep_reserve();

// While it lives the reserve is given back, for code that calls malloc and breaks when that fails (HDF5).
class FreedReserve {
 public:
  FreedReserve();
  ~FreedReserve();  // keeps the reserve again if it was kept before
  FreedReserve(const FreedReserve&) = delete;
  FreedReserve& operator=(const FreedReserve&) = delete;

 private:
  bool kept_;
};

// Throws NoRoom if the reserve was used. Long work calls it between two of its pieces; it costs one load of memory.
inline void check_reserve() {
  if (detail::reserve_used.load(std::memory_order_relaxed)) detail::no_reserve();
}

// Starts the threads of parallel regions. Throws NoRoom when the system refuses one of them; OpenMP itself would end
// the process.
void start_threads();

}  // namespace kvlab
