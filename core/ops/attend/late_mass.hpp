// Attention mass that a GPU adds to token state later than attention. Attention leaves its shares of the softmax, so
// its blocks do not wait for one another, and one launch adds those of several layers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "ops/attend/attend.hpp"

namespace kvlab::ops {

// Where a head's shares lie (attend_shares.cuh).
struct ShareLayout {
  static constexpr int tokens = 16;  // of a record

  std::int64_t head = 0;                         // bytes between KV heads, a multiple of 16
  int record = 0, behind_high = 0, of_pair = 0;  // bytes: of a record, of `high` in it, of a pair's shares of a token

  ShareLayout() = default;
  ShareLayout(int group, std::int64_t head_tokens) {
    const int pairs = (group + 1) / 2;
    of_pair = group == 1 ? 4 : 8, behind_high = 8 * pairs, record = behind_high + 8 * of_pair * pairs;
    head = ((head_tokens + tokens - 1) / tokens * record + 15) / 16 * 16;
  }
};

// What attention of one layer leaves.
struct LateMass {
  std::byte* room = nullptr;  // bytes() of device memory, aligned to 16 bytes
  int tokens = 0;             // no head has more, neither now nor when a graph runs again
  bool left = false;          // set by the op; it fills what follows then
  PagedKv kv;
  MassColumn into;
  int heads = 0;  // query heads

  // Of the room: for each row its shares, then for each row its log-sum-exps.
  static std::int64_t bytes(std::int64_t rows, int heads, int kv_heads, std::int64_t tokens) {
    return (rows * shares_of_row(heads, kv_heads, tokens) + rows * heads * 4 + 15) / 16 * 16;
  }
  static std::int64_t shares_of_row(int heads, int kv_heads, std::int64_t tokens) {
    return kv_heads * ShareLayout(heads / kv_heads, tokens).head;
  }
};

// Adds what attention left of these layers, of one step and one store, to token state. It is CUDA's alone. Layers whose
// memory lies at equal distances share a launch. Their tokens must be those that attention read, at the same places.
// Bytes: shares, and the column twice.
void add_late_mass(std::span<const LateMass> layers, Stream s);

}  // namespace kvlab::ops
