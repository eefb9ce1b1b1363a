#include "ops/linear/embed.hpp"

#include "base/device_op.hpp"
#include "ops/page/check.hpp"

namespace kvlab::ops {

void embed(const EmbedArgs& a, Stream s) {
  require_cuda_stream(s, "embed");
  only_on_cuda<embed>(a, s);
}

}  // namespace kvlab::ops
