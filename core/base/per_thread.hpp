// Memory for each OpenMP thread, taken before a parallel region: a thread inside of one must not throw.
#pragma once
#include <omp.h>

#include <cstddef>
#include <span>
#include <vector>

namespace kvlab {

// `count` elements for each thread of the parallel regions that this thread starts. Elements keep what a thread left in
// them.
template <class T>
class PerThread {
 public:
  explicit PerThread(std::size_t count)
      : count_(count), step_(count + apart), all_(step_ * static_cast<std::size_t>(omp_get_max_threads())) {}
  std::span<T> own() { return {all_.data() + step_ * static_cast<std::size_t>(omp_get_thread_num()), count_}; }

 private:
  static constexpr std::size_t apart = 64 / sizeof(T) + 1;  // no two threads write to one cache line
  std::size_t count_, step_;
  std::vector<T> all_;
};

}  // namespace kvlab
