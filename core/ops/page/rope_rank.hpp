// RoPE of the cache_relative and re_rotate regimes, on CUDA alone.
#pragma once
#include <kvlab/stream.hpp>
#include <kvlab/view.hpp>

#include <cstdint>

namespace kvlab::ops {

// Rotates queries and keys of new tokens by rank: length + ahead + row * step, with the length of their KV head. All
// pointers are device memory.
struct RopeRankArgs {
  int rows = 0, heads = 0, kv_heads = 0, head_dim = 0;
  int values = 0;            // value heads after queries and keys; they are copied unchanged
  const float* x = nullptr;  // [row, heads + kv_heads + values, head_dim]: queries, keys, values
  std::int64_t x_stride = 0;
  float* out = nullptr;  // the shape of x
  std::int64_t out_stride = 0;
  const float *cosine = nullptr, *sine = nullptr;  // [angles, head_dim / 2]; larger ranks use the last row
  int angles = 0;
  View<const std::int32_t, 2> length;   // [slot, kv_head]
  const std::int32_t* slots = nullptr;  // [row]; null = slot 0 of every row
  int ahead = -1, step = 0;             // -1: length already counts the token
};
void rope_rank(const RopeRankArgs& a, Stream s);  // Errc::unsupported for a CPU stream

}  // namespace kvlab::ops
