// Every op equals its reference in the cases of its list, on the CPU. Those of core/test/cuda/cases_test.cpp are the
// same.
#include "support/gemm_kernels.hpp"
#include "support/run_cases.hpp"

TEST_CASE("cases: top tokens, top pages and allotments") { kvlab::test::run_cases("select", kvlab::Device::cpu); }
TEST_CASE("cases: attention of decode steps") { kvlab::test::run_cases("attend", kvlab::Device::cpu); }
TEST_CASE("cases: attention of prompts") { kvlab::test::run_cases("prefill_attention", kvlab::Device::cpu); }
TEST_CASE("cases: scores") { kvlab::test::run_cases("score", kvlab::Device::cpu); }
TEST_CASE("cases: placement and injected lists") { kvlab::test::run_cases("placement", kvlab::Device::cpu); }
TEST_CASE("cases: checks of a plugin's numbers") { kvlab::test::run_cases("verify", kvlab::Device::cpu); }
TEST_CASE("cases: linear layers with every kernel") {
  for (const char* kernels : kvlab::test::gemm_kernels()) {
    const kvlab::test::ForcedGemm forced(kernels);
    CAPTURE(kernels);
    kvlab::test::run_cases("gemv", kvlab::Device::cpu);
    kvlab::test::run_cases("gemm", kvlab::Device::cpu);
  }
}
TEST_CASE("cases: norms of rows") { kvlab::test::run_cases("norm", kvlab::Device::cpu); }
TEST_CASE("cases: stored tokens, copies and rotations") { kvlab::test::run_cases("append", kvlab::Device::cpu); }
TEST_CASE("cases: tokens and pages that move") { kvlab::test::run_cases("copy", kvlab::Device::cpu); }
