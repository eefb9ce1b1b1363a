// Rows of keys or values as a codebook would store them. They are those of kvlab/rewrite.hpp: a policy that stands for
// such a format stores them by Edits::rewrite. ops.hpp says what holds for every op.
#pragma once
#include "kvlab/kv.hpp"
#include "kvlab/rewrite.hpp"
#include "kvlab/stream.hpp"

namespace kvlab {

// 1 to 256 entries, in memory of the stream's device, contiguous.
struct Codebook {
  View<const float, 1> centres;  // a number takes the nearest one, and of two the first
  View<const float, 1> levels;   // and becomes the level of the same entry
};

// Numbers that share thresholds [lower, upper] have zero = (upper + lower) / 2 and range = (upper - lower) / 2. A
// number x between them becomes zero + range * level, by the centre nearest to (x - zero) / range. With a range of 0 it
// becomes zero. A number outside is an outlier. NaN and infinite numbers stay as they are.
struct Coding {
  Codebook book;
  bool exact_outliers = true;  // outliers stay as they are; false: they become a level, too
  ops::RowRange range;         // the other rows stay as they are
};

namespace ops {

// Each channel of a head has thresholds of its own: lower, upper [kv_head, head_dim], contiguous along head_dim.
// KVQuant (Hooper et al. 2024) stores keys so, before RoPE. All is computed in f64. Bytes: the rows, twice.
void code_channels(const PagedKv& kv, View<const float, 2> lower, View<const float, 2> upper, const Coding& how,
                   View<float, 4> rows, Stream s);

// The numbers of a token share thresholds: their quantiles outliers / 2 and 1 - outliers / 2, with linear
// interpolation. They are those of all heads whose row at this place is in range. 0 <= outliers < 1. KVQuant stores
// values so. All is computed in f64. Bytes: the rows, twice.
void code_tokens(const PagedKv& kv, double outliers, const Coding& how, View<float, 4> rows, Stream s);

}  // namespace ops
}  // namespace kvlab
