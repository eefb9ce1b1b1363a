// ops::row_dot by tensor cores.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>

namespace kvlab::ops {

// Computes row_dot and returns true where the kernel serves the cache: pages of bf16, keys not turned by their rank,
// head_dim 64, 96, 128 or 256. Elsewhere it does nothing and returns false. f16 would lose small and large elements of
// the vectors.
bool row_dot_tiles(const KvRows& rows, View<const float, 3> vectors, Scores out, Stream s);

}  // namespace kvlab::ops
