// The attention of many queries, as one number for each token. ops.hpp says what holds for every op.
#pragma once
#include <cstdint>

#include "kvlab/kv.hpp"
#include "kvlab/ops.hpp"
#include "kvlab/stream.hpp"

namespace kvlab {

// What a token's number is, over the queries of the group's query heads.
enum class ShareRule : std::uint8_t {
  sum,         // of its shares
  max,         // the greatest of its shares
  below_mean,  // queries whose shares, mean over the group, are below 1 / tokens that the query sees
  below_each   // the same count for each query head, added up
};

struct QueryShares {
  ShareRule rule = ShareRule::sum;
  // [row] text tokens that the newest query sees (LayerKv::position, uploaded). null: all queries see all cached
  // tokens. Each query sees one more than the one before it; if `alike`, all see as many as the newest.
  const std::int32_t* seen = nullptr;
  bool alike = false;
  const float* temperature = nullptr;  // [row], above 0; null = 1
  bool of_slots = false;               // queries are [slot, ...], as in state memory, in place of [row, ...]
  // Gumbel noise -ln(-ln(u + 2^-26)) on each logit; null = none. [row, query head of the group, query]: u is the draw
  // of ops::random_scores by this key, the KV head and the token's text position.
  const std::uint64_t* noise = nullptr;
};

namespace ops {

// out[row, kv_head, token] from softmax_j((q . k_j / sqrt(D) + noise) / temperature) of every query, over the cached
// tokens that it sees. It gives the others 0. queries: [row, query head, w, head_dim], f32, contiguous along head_dim.
// Bytes: the layer's keys, twice for each 64 queries of a query head.
void query_shares(const Tensor<4>& queries, const PagedKv& kv, const QueryShares& how, Scores out, Stream s);

}  // namespace ops
}  // namespace kvlab
