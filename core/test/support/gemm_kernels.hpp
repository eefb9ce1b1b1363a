#pragma once
#include <cstdlib>
#include <vector>

#include "base/cpu.hpp"

namespace kvlab::test {

// The CPU's linear layers use these kernels while it lives (KVLAB_GEMM).
class ForcedGemm {
 public:
  explicit ForcedGemm(const char* kernels) { setenv("KVLAB_GEMM", kernels, 1); }
  ~ForcedGemm() { unsetenv("KVLAB_GEMM"); }
  ForcedGemm(const ForcedGemm&) = delete;
};

inline std::vector<const char*> gemm_kernels() {
  std::vector<const char*> v{"", "onednn", "portable"};
  if (has_avx2()) v.push_back("avx2");
  return v;
}

}  // namespace kvlab::test
