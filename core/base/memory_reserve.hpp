// What keeps a process that runs out of memory (ulimit -v, a limit of its data) from ending without a result.
#pragma once
#include <atomic>

namespace kvlab {

namespace detail {
extern std::atomic<bool> reserve_used;
[[noreturn]] void no_reserve();
}  // namespace detail

// Keeps 16 MiB aside, again after they were used. operator new gives them back when it finds nothing: a small
// allocation in a parallel region, which no exception may leave, then has its memory. False: the system has none.
bool keep_reserve();

// While it lives the reserve is given back: for code that takes memory with malloc and breaks without it (HDF5).
class FreedReserve {
 public:
  FreedReserve();
  ~FreedReserve();  // keeps it again, where it was kept
  FreedReserve(const FreedReserve&) = delete;
  FreedReserve& operator=(const FreedReserve&) = delete;

 private:
  bool kept_;
};

// Throws NoRoom when the reserve was used: work in hand ends between two of its pieces. One load of memory otherwise.
inline void check_reserve() {
  if (detail::reserve_used.load(std::memory_order_relaxed)) detail::no_reserve();
}

// Starts the threads of parallel regions. Throws NoRoom when the system refuses one of them; OpenMP itself would end
// the process.
void start_threads();

}  // namespace kvlab
