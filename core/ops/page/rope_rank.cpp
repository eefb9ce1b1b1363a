#include "ops/page/rope_rank.hpp"

#include "base/device_op.hpp"
#include "ops/page/check.hpp"

namespace kvlab::ops {

void rope_rank(const RopeRankArgs& a, Stream s) {
  require_cuda_stream(s, "rope_rank");
  only_on_cuda<rope_rank>(a, s);
}

}  // namespace kvlab::ops
