// Every op equals its reference in the cases of its list, on the GPU. Those of core/test/cases are the same.
#include "support/run_cases.hpp"

TEST_CASE("cuda cases: top tokens, top pages and allotments") { kvlab::test::run_cases("select", kvlab::Device::cuda); }
TEST_CASE("cuda cases: attention of decode steps") { kvlab::test::run_cases("attend", kvlab::Device::cuda); }
TEST_CASE("cuda cases: attention of prompts") { kvlab::test::run_cases("prefill_attention", kvlab::Device::cuda); }
TEST_CASE("cuda cases: scores") { kvlab::test::run_cases("score", kvlab::Device::cuda); }
TEST_CASE("cuda cases: placement and injected lists") { kvlab::test::run_cases("placement", kvlab::Device::cuda); }
TEST_CASE("cuda cases: checks of a plugin's numbers") { kvlab::test::run_cases("verify", kvlab::Device::cuda); }
TEST_CASE("cuda cases: linear layers of few rows") { kvlab::test::run_cases("gemv", kvlab::Device::cuda); }
TEST_CASE("cuda cases: linear layers of many rows") { kvlab::test::run_cases("gemm", kvlab::Device::cuda); }
TEST_CASE("cuda cases: norms of rows, embed and argmax") { kvlab::test::run_cases("norm", kvlab::Device::cuda); }
TEST_CASE("cuda cases: rotations and appends") { kvlab::test::run_cases("append", kvlab::Device::cuda); }
TEST_CASE("cuda cases: tokens and pages that move") { kvlab::test::run_cases("copy", kvlab::Device::cuda); }
