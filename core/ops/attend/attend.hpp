// Attention over paged K and V while decoding: one query token per row.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/policy.hpp>
#include <kvlab/stream.hpp>

namespace kvlab::ops {

struct AttendArgs {
  PagedKv kv;                    // all listed pages must be resident (a null frame is Errc::internal)
  View<const float, 3> queries;  // [row, query head, head_dim], already rotated for the regime
  // What is attended to: [row, kv_head, i], ascending and without repeats. Null = everything; both is Errc::internal.
  // A count of 0 leaves nothing.
  const PageList* pages = nullptr;    // logical pages
  const TokenList* tokens = nullptr;  // places in the cache; the pages that they lie in must be resident
  float softmax_scale = 0;            // 0 = 1 / sqrt(head_dim)
  int window = 0;  // model's sliding window in tokens, 0 = none: only positions > last - window are seen
  const std::int32_t* last = nullptr;  // [row] text position of the query
  View<float, 3> out;                  // [row, query head, head_dim]
  void* rounded = nullptr;             // optional, CUDA only, of a dense out: the same in the cache's 16-bit dtype
  View<float, 2> lse;                  // optional: [row, query head], natural log
  View<float, 3> mass;                 // optional: [row, query head, token place]; 0 where not attended, to its extent
};

// Splits every row into fixed chunks of pages or of listed tokens and merges their partial softmaxes in order, so the
// result does not depend on the number of threads or on other rows. A list of all pages equals no list bit for bit; one
// of all tokens equals it within rounding. Nothing to attend to gives out 0 and lse -inf. Bytes: K, V and positions of
// the listed pages or tokens. On the CPU a list that breaks the rules above is Errc::internal. On CUDA, where the host
// does not look into lists, they go unchecked, but places of a list of tokens that the cache does not have are left
// out; these lists go to the general kernel (ops/attend/attend.cuh), whatever the cache.
void attend(const AttendArgs& a, Workspace& w, Stream s);
void attend_reference(const AttendArgs& a);  // plain loops, double accumulation: the oracle

}  // namespace kvlab::ops
