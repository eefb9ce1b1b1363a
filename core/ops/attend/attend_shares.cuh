// Shares that attention's pipelined kernel leaves of a softmax: of each token and query head 2^(score - high) in f16,
// where `high` is the greatest score that the warp has met so far in the pair. With the softmax's sum known, a share
// times 2^high is a probability: a product for a token, and a power for 16 tokens. Shares are half the bytes of scores,
// and lose no more than 2^-12 of a probability or 2^-25 of the greatest.
#pragma once
#include <cstdint>

#include "ops/attend/attend.hpp"
#include "ops/attend/attend_unit.cuh"
#include "ops/attend/late_mass.hpp"

namespace kvlab::ops {

// A head has a record for each 16 token places. A record has f32 [pair of query heads, 2] `high`, then f16 [token,
// pair, 2, 2] shares of token t and t + 8 in two query heads. A group of one head has records of [1] and [token, 2], in
// the place of a pair. The memory is that of AttendArgs::mass, or of LateMass.
struct MassShares : ShareLayout {
  static_assert(tokens == unit_tokens);

  float* data = nullptr;  // null = none; each row begins at the next multiple of 16 bytes
  std::int64_t row = 0;   // floats between rows

  // False if the room is too small.
  bool fill(const View<float, 3>& room, const PagedKv& kv) {
    static_cast<ShareLayout&>(*this) = ShareLayout(static_cast<int>(room.extent[1]) / kv.kv_heads, room.extent[2]);
    data = room.data, row = room.stride[0];
    return kv.page_size % tokens == 0 && kv.kv_heads * head + 12 <= room.extent[1] * room.stride[1] * 4;
  }
  void fill(const LateMass& room, int heads, int kv_heads) {
    static_cast<ShareLayout&>(*this) = ShareLayout(heads / kv_heads, room.tokens);
    data = reinterpret_cast<float*>(room.room), row = kv_heads * head / 4;
  }
  // The log-sum-exps of the same room, [row, query head].
  static float* lse_of(const LateMass& room, int rows, int heads, int kv_heads) {
    return reinterpret_cast<float*>(room.room + rows * LateMass::shares_of_row(heads, kv_heads, room.tokens));
  }

#ifdef __CUDACC__
  __device__ __forceinline__ std::byte* of(int r, int kv_head) const {
    const auto begin = reinterpret_cast<std::uintptr_t>(data + r * row) + 15;
    return reinterpret_cast<std::byte*>(begin - begin % 16) + kv_head * head;
  }
#endif
};

}  // namespace kvlab::ops
