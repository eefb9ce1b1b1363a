#include "ops/page/prompt_pages.hpp"

#include "base/device_op.hpp"
#include "ops/page/check.hpp"

namespace kvlab::ops {

void prompt_pages(const PromptPagesArgs& a, Stream s) {
  require_cuda_stream(s, "prompt_pages");
  only_on_cuda<prompt_pages>(a, s);
}

}  // namespace kvlab::ops
