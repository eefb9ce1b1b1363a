#include "base/log.hpp"
#include "plugin/callback.hpp"
#include "support/contract.hpp"
#include "support/gpu.hpp"

extern "C" int kvlab_test_skip() {
  kvlab::name_callback_at_end();
  kvlab::log::start({kvlab::log::Level::warning, {}});  // without the progress of profilers' runs
  return kvlab::test::on_cuda() ? kvlab::test::skip_without_gpu() : 0;
}
