// What the ops of kvlab/key_factors.hpp share with the store, which makes keys of single pages.
#pragma once
#include <kvlab/key_factors.hpp>

namespace kvlab::ops {

inline constexpr int rebuilt_at_once = 16, most_head_dim = 256;

// The keys of a head's places first, first + 1, ... as rebuild_rows gives them, on the CPU. positions: [count], of
// their tokens. out: `count` rows `stride` floats apart. A key does not depend on the others of the call.
void rebuild_keys(const KeyFactors& f, int slot, int head, int first, int count, const std::int32_t* positions,
                  const RopeTable& rope, float* out, std::int64_t stride);

void rebuild_rows_reference(const PagedKv& kv, const KeyFactors& factors, View<float, 4> rows);

}  // namespace kvlab::ops
