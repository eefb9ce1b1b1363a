#include "ops/page/rope_append.hpp"

#include "base/device_op.hpp"
#include "ops/page/check.hpp"

namespace kvlab::ops {

void rope_append(const RopeAppendArgs& a, Stream s) {
  require_cuda_stream(s, "rope_append");
  only_on_cuda<rope_append>(a, s);
}

}  // namespace kvlab::ops
