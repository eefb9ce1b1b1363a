// Made-up tokens (kvlab/kv.hpp): what ops check of them.
#pragma once
#include "ops/page/check.hpp"

namespace kvlab::ops {

// Wants [slot, kv_head, i, head_dim] of the cache's heads, head_dim contiguous. On the CPU also every row's slot.
// Errc::internal or unsupported.
inline void check_made_up(const PagedKv& kv, const MadeUpTokens& tokens, const char* op, Stream s) {
  const std::int64_t count = tokens.weights.extent[2];
  for (const auto* side : {&tokens.keys, &tokens.values}) {
    if (side->extent[1] != kv.kv_heads || side->extent[2] != count || side->extent[3] != kv.head_dim ||
        side->extent[0] != tokens.weights.extent[0] || tokens.weights.extent[1] != kv.kv_heads || !side->data)
      fail(Errc::internal, op,
           "got made-up tokens of another shape than the cache, wanted [slot, kv_head, i, head_dim] and their weights");
    if (side->stride[3] != 1) fail(Errc::unsupported, op, "got strided made-up tokens, wanted head_dim contiguous");
  }
  for (int row = 0; s.device() == Device::cpu && row < kv.rows; ++row)
    if (kv.slots[row] >= tokens.weights.extent[0])
      fail(Errc::internal, op,
           "got made-up tokens of " + std::to_string(tokens.weights.extent[0]) + " slots, wanted slot " +
               std::to_string(kv.slots[row]));
}

}  // namespace kvlab::ops
