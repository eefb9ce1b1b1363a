#include "ops/page/causal.hpp"

#include "base/device_op.hpp"

namespace kvlab::ops {

void causal(const std::int32_t* now, int kv_heads, int tokens, std::int32_t* length, std::int32_t* row, Stream s) {
  if (s.device() == Device::cuda) return on_cuda<causal>(now, kv_heads, tokens, length, row, s);
  for (int t = 0; t < tokens; ++t) {
    row[t] = t;
    for (int head = 0; head < kv_heads; ++head) length[t * kv_heads + head] = now[head] - tokens + t + 1;
  }
}

}  // namespace kvlab::ops
