// Ops on the rows that Edits::rewrite stores. ops.hpp says what holds for every op. Rows are those of ops::read_rows,
// [row, kv_head, token, head_dim] in f32, contiguous along head_dim. The first tokens(row, kv_head) of a head count.
#pragma once
#include <cstdint>

#include "kvlab/kv.hpp"
#include "kvlab/ops.hpp"
#include "kvlab/stream.hpp"

namespace kvlab::ops {

// As ops::read_rows, of these tokens alone: out[row, kv_head, i, :] is the row of place first + i. The pages of the
// other tokens may be on the host. Bytes: the rows of the range, and out.
void read_range(const KvRows& rows, const TokenRange& range, View<float, 4> out, Stream s);

// out[row, kv_head, d] = mean of q_d^2 over all queries of the group's query heads, times the mean of x_d^2 over the
// head's rows x. A head without tokens gives zeros. Sums are in f64. queries: [row, query head, w, head_dim], f32,
// contiguous along head_dim. ThinK's score of a channel. Bytes: queries and rows.
void channel_energy(const Tensor<4>& queries, const PagedKv& kv, View<const float, 4> rows, View<float, 3> out,
                    Stream s);

// rows[row, kv_head, token, d] = 0 for the `count` channels d of the head with the least energy. The last `newest`
// places keep theirs. The cache must be in text order, as at a prompt's end. energy: [row, kv_head, d]. The lower of
// two equal channels stays. Bytes: the elements written.
void zero_channels(const PagedKv& kv, View<const float, 3> energy, int count, int newest, View<float, 4> rows,
                   Stream s);

// The rows of a head that an op changes: those at places from(row, kv_head) on, and none below `least`. So a policy
// leaves what an earlier prompt of the sequence stored alone.
struct RowRange {
  View<const std::int32_t, 2> from;  // [row, kv_head] memory of the stream's device; empty = 0
  int least = 0;

  constexpr int first(std::int64_t row, std::int64_t head) const {
    if (!from.data) return least;
    const int own = from.data[row * from.stride[0] + head * from.stride[1]];
    return own > least ? own : least;
  }
};

// Which way ops::turn_rows goes. off: from keys as the cache has them to those before RoPE. on: back to the cache's.
enum class RopeTurn : std::uint8_t { off, on };

// Turns rows of keys by their tokens' text positions. `off` undoes RoPE and divides by attention_scale. `on` rotates
// and multiplies, as kv.hpp has it. Both ways in a row change a row by rounding. Errc::unsupported: a regime but
// RopeRegime::original, whose keys are turned by other numbers. Every page must be on the device. Bytes: the rows,
// twice, and the positions.
void turn_rows(const PagedKv& kv, RopeTurn way, View<float, 4> rows, Stream s, const RowRange& range = {});

// to[row, kv_head, token, :] = from[...] for the listed tokens. Bytes: the listed rows, twice.
void copy_rows(const PagedKv& kv, const TokenList& tokens, View<const float, 4> from, View<float, 4> to, Stream s);

// row_distance and merge_rows take rows of two layers that hold the same tokens at the same places. kv is either one.

// out[row, kv_head, token] = the angle between a and b, divided by pi. A row of zeros has the distance 1 to any other.
// Bytes: a, b and out.
void row_distance(const PagedKv& kv, View<const float, 4> a, View<const float, 4> b, Scores out, Stream s);

// a and b both get the direction between theirs, and keep their lengths. t = 0 is the direction of a, and 1 that of b.
// Between them it goes along the great circle (slerp). Tokens on the list stay as they are, and so do those of distance
// 1, whose direction between is not defined. MiniCache. Bytes: a and b, twice.
void merge_rows(const PagedKv& kv, float t, const TokenList& exact, View<float, 4> a, View<float, 4> b, Stream s);

}  // namespace kvlab::ops
