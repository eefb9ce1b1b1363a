// Products of cached rows by tensor cores.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>

#include "ops/score/rows.hpp"

namespace kvlab::ops {

// Computes row_dot or listed_row_dot and returns true where the kernel serves the cache: pages of bf16, keys not turned
// by their rank, head_dim 64, 96, 128 or 256, and for lists pages of a multiple of 16 tokens. Elsewhere it does nothing
// and returns false. f16 would lose small and large elements of the vectors.
bool row_product_tiles(const KvRows& rows, View<const float, 3> vectors, const RowProduct& how, Scores out, Stream s);

}  // namespace kvlab::ops
