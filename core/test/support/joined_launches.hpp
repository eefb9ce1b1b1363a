// How many layers share a launch.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "base/backend.hpp"
#include "base/device_op.hpp"
#include "ops/attend/late_mass.hpp"
#include "store/cuda_kernels.hpp"

namespace kvlab::test {

// While it lives, it notes how many layers each launch has that evicts a surplus or adds late mass.
class JoinedLaunches {
 public:
  JoinedLaunches()
      : table_(require_cuda("a test")), evicting_(evict, table_.announced), adding_(add, table_.announced) {
    evict_ = real<cuda_store::evict_surplus>(), add_ = real<ops::add_late_mass>();
    evictions_.clear(), masses_.clear(), order_.clear();
    replace_cuda_backend(&table_);
  }
  ~JoinedLaunches() { replace_cuda_backend(nullptr); }
  JoinedLaunches(const JoinedLaunches&) = delete;
  const std::vector<int>& evictions() const { return evictions_; }
  const std::vector<int>& masses() const { return masses_; }
  const std::string& order() const { return order_; }  // of both: e = an eviction, m = mass

 private:
  template <auto Op>
  static decltype(Op) real() {
    return reinterpret_cast<decltype(Op)>(find_cuda_op(typeid(CudaOpKey<Op>).name()));
  }
  static void evict(const CudaStoreLayer& s, const CudaStoreSurplus& a, Stream stream) {
    evictions_.push_back(a.layers);
    order_ += 'e';
    evict_(s, a, stream);
  }
  static void add(std::span<const ops::LateMass> layers, Stream stream) {
    masses_.push_back(static_cast<int>(layers.size()));
    order_ += 'm';
    add_(layers, stream);
  }
  CudaBackend table_;
  OnCuda<cuda_store::evict_surplus> evicting_;
  OnCuda<ops::add_late_mass> adding_;
  static inline decltype(&cuda_store::evict_surplus) evict_ = nullptr;
  static inline decltype(&ops::add_late_mass) add_ = nullptr;
  static inline std::vector<int> evictions_, masses_;
  static inline std::string order_;
};

}  // namespace kvlab::test
