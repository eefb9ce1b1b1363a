// RoPE of the cache_relative and re_rotate regimes, on CUDA alone.
#pragma once
#include <kvlab/stream.hpp>
#include <kvlab/view.hpp>

#include <cstdint>

namespace kvlab::ops {

// Heads of new tokens, turned by the token's rank in its head's cache, length + ahead + row * step. Everything is in
// device memory.
struct RopeRankArgs {
  int rows = 0, heads = 0, kv_heads = 0, head_dim = 0;
  int values = 0;            // heads behind those, which go over as they are
  const float* x = nullptr;  // [row, heads + kv_heads + values, head_dim]: queries, keys
  std::int64_t x_stride = 0;
  float* out = nullptr;  // the same, turned
  std::int64_t out_stride = 0;
  const float *cosine = nullptr, *sine = nullptr;  // [angles, head_dim / 2]; ranks beyond take the last
  int angles = 0;
  View<const std::int32_t, 2> length;   // [slot, kv_head]
  const std::int32_t* slots = nullptr;  // [row]; null = slot 0 of every row
  int ahead = -1, step = 0;             // -1: the token is counted in length already
};
void rope_rank(const RopeRankArgs& a, Stream s);  // Errc::unsupported for a CPU stream

}  // namespace kvlab::ops
