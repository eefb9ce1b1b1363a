#include "ops/linear/argmax.hpp"

#include "base/device_op.hpp"
#include "ops/page/check.hpp"

namespace kvlab::ops {

void argmax(const ArgmaxArgs& a, Stream s) {
  require_cuda_stream(s, "argmax");
  only_on_cuda<argmax>(a, s);
}

}  // namespace kvlab::ops
