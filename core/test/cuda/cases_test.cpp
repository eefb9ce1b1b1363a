// Every op equals its reference in the cases of its list, on the GPU: one test case for each op, "cuda cases: attend"
// for one.
#include "support/run_cases.hpp"

static const bool registered = kvlab::test::register_cases("cuda cases: ", kvlab::Device::cuda);
