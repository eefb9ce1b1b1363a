// Every op equals its reference in the cases of its list, on the CPU: one test case for each op, "cases: attend" for
// one. Those of core/test/cuda/cases_test.cpp are the same on a GPU.
#include "support/gemm_kernels.hpp"
#include "support/run_cases.hpp"

using namespace kvlab;

static const bool registered = test::register_cases("cases: ", Device::cpu);

TEST_CASE("linear cases with every kernel") {
  for (const char* kernels : test::gemm_kernels()) {
    const test::ForcedGemm forced(kernels);
    CAPTURE(kernels);
    test::run_cases("gemv", Device::cpu);
    test::run_cases("gemm", Device::cpu);
  }
}
