#include "support/contract.hpp"
#include "support/gpu.hpp"

extern "C" int kvlab_test_skip() { return kvlab::test::on_cuda() ? kvlab::test::skip_without_gpu() : 0; }
