#include "model/random_weights.hpp"

#include "base/device_op.hpp"
#include "ops/page/check.hpp"

namespace kvlab {

void random_weights(void* out, DType dtype, std::int64_t first, std::int64_t count, std::uint64_t seed, float scale,
                    Stream s) {
  ops::require_cuda_stream(s, "random_weights");
  only_on_cuda<random_weights>(out, dtype, first, count, seed, scale, s);
}

}  // namespace kvlab
