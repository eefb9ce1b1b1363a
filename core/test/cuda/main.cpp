#include "support/gpu.hpp"

extern "C" int kvlab_test_skip() { return kvlab::test::skip_without_gpu(); }
