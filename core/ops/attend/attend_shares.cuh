// Shares that attention's pipelined kernel leaves of a softmax: of each token and query head 2^(score - high) in f16,
// where `high` is the greatest score that the warp has met so far in the pair. With the softmax's sum known, a share
// times 2^high is a probability: a product for a token, and a power for 16 tokens. Shares are half the bytes of scores,
// and lose no more than 2^-12 of a probability or 2^-25 of the greatest.
#pragma once
#include <cstdint>

#include "ops/attend/attend.hpp"
#include "ops/attend/attend_unit.cuh"

namespace kvlab::ops {

// Memory of the shares: that of AttendArgs::mass. A head has a record for each 16 token places. A record has f32
// [pair of query heads, 2] `high`, then f16 [token, pair, 2, 2] shares of token t and t + 8 in two query heads. A group
// of one head has records of [1] and [token, 2], in the place of a pair.
struct MassShares {
  static constexpr int tokens = unit_tokens;

  float* data = nullptr;                         // null = none; each row begins at the next multiple of 16 bytes
  std::int64_t row = 0, head = 0;                // floats between rows, bytes between heads
  int record = 0, behind_high = 0, of_pair = 0;  // bytes: of a record, of `high` in it, of a pair's shares of a token

  // False if the room is too small.
  bool fill(const View<float, 3>& room, const PagedKv& kv) {
    const int group = static_cast<int>(room.extent[1]) / kv.kv_heads, pairs = (group + 1) / 2;
    of_pair = group == 1 ? 4 : 8, behind_high = 8 * pairs, record = behind_high + 8 * of_pair * pairs;
    head = ((room.extent[2] + tokens - 1) / tokens * record + 15) / 16 * 16;
    data = room.data, row = room.stride[0];
    return kv.page_size % tokens == 0 && kv.kv_heads * head + 12 <= room.extent[1] * room.stride[1] * 4;
  }

#ifdef __CUDACC__
  __device__ __forceinline__ std::byte* of(int r, int kv_head) const {
    const auto begin = reinterpret_cast<std::uintptr_t>(data + r * row) + 15;
    return reinterpret_cast<std::byte*>(begin - begin % 16) + kv_head * head;
  }
#endif
};

}  // namespace kvlab::ops
