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
// out; these lists go to the general kernel (ops/attend/attend_cuda.hpp), whatever the cache.
void attend(const AttendArgs& a, Workspace& w, Stream s);
void attend_reference(const AttendArgs& a);  // plain loops, double accumulation: the oracle

struct PrefillArgs {
  PagedKv kv;                    // row 0 only: what the chunk also sees. KV head h has its own past, kv.tokens(0, h)
                                 // tokens (evictions between chunks may leave heads of different lengths)
  View<const float, 3> queries;  // [token, query head, head_dim] of the chunk
  View<const float, 3> keys;     // [token, kv_head, head_dim] of the chunk, rotated, rounded to the cache's dtype
  View<const float, 3> values;   // [token, kv_head, head_dim]
  float softmax_scale = 0;       // 1 / sqrt(head_dim) unless the model says otherwise
  int window = 0;                // as in AttendArgs; by stored positions
  int first = 0;                 // text position of the chunk's first token
  View<float, 3> out;            // [token, query head, head_dim]
  bool round_to_bf16 = false;    // queries and probabilities may be rounded for matrix tiles, where the CPU has them
  View<float, 2> mass;           // optional: [query head, past of its head + chunk] column sums of the probabilities
};

// Causal attention of one prompt chunk of one sequence over its past (read back from the pages) and itself.
void prefill_attention(const PrefillArgs& a, Workspace& w, Stream s);
void prefill_attention_reference(const PrefillArgs& a);

}  // namespace kvlab::ops
