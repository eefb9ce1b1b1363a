// How many layers share a launch.
#pragma once
#include <vector>

#include "base/backend.hpp"
#include "base/device_op.hpp"
#include "store/cuda_kernels.hpp"

namespace kvlab::test {

// While it lives, it notes how many layers each launch has that evicts a surplus.
class JoinedLaunches {
 public:
  JoinedLaunches() : table_(require_cuda("a test")), evicting_(evict, table_.announced) {
    evict_ = real<cuda_store::evict_surplus>();
    evictions_.clear();
    replace_cuda_backend(&table_);
  }
  ~JoinedLaunches() { replace_cuda_backend(nullptr); }
  JoinedLaunches(const JoinedLaunches&) = delete;
  const std::vector<int>& evictions() const { return evictions_; }

 private:
  template <auto Op>
  static decltype(Op) real() {
    return reinterpret_cast<decltype(Op)>(find_cuda_op(typeid(CudaOpKey<Op>).name()));
  }
  static void evict(const CudaStoreLayer& s, const CudaStoreSurplus& a, Stream stream) {
    evictions_.push_back(a.layers);
    evict_(s, a, stream);
  }
  CudaBackend table_;
  OnCuda<cuda_store::evict_surplus> evicting_;
  static inline decltype(&cuda_store::evict_surplus) evict_ = nullptr;
  static inline std::vector<int> evictions_;
};

}  // namespace kvlab::test
