// Causal attention of one chunk of one sequence's prompt to the tokens before it and to itself.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/prompt_mask.hpp>
#include <kvlab/stream.hpp>
#include <kvlab/workspace.hpp>

#include <algorithm>
#include <bit>

#include "base/library_state.hpp"

namespace kvlab::ops {

// best: cuDNN if it is there and the chunk is long enough, else our own kernel. cudnn: cuDNN only.
enum class PromptKernel { best, own, cudnn };

// `best` uses cuDNN for chunks of at least this many rows.
inline constexpr int prompt_cudnn_rows = 512;

// Rows that PromptArgs::rounded and rounded_queries must have room for.
constexpr int prompt_room(int rows) {
  const int step = std::max(64, static_cast<int>(std::bit_ceil(static_cast<unsigned>(rows)) / 4));
  return (rows + step - 1) / step * step;
}

struct PromptArgs {
  // CPU: row 0 holds the tokens before the chunk only. KV head h has kv.tokens(0, h) of them; evictions between chunks
  // may leave heads of different lengths.
  // CUDA: row r is the chunk's r-th token. All rows share one slot, whose pages already hold the chunk. Row r sees
  // itself and all that row r - 1 sees.
  PagedKv kv;
  View<const float, 3> queries;  // [token, query head, head_dim], rotated; CUDA: rows and heads 16-byte aligned
  float softmax_scale = 0;       // 0 = 1 / sqrt(head_dim)
  int window = 0;                // as in AttendArgs, by stored positions; CPU only
  int first = 0;                 // text position of the chunk's first token; CUDA: for masks only
  // Optional: [kv_head] masks by stored positions, which are those of the text. Memory of the device. On CUDA our own
  // kernel skips tokens of the chunk that are masked. It reads all tokens before the chunk.
  const PromptMask* masks = nullptr;
  View<float, 3> out;  // [token, query head, head_dim]
  // Optional: [query head, place] sums of probabilities over the chunk's tokens. Places before the chunk come first,
  // then the chunk's. On CUDA a place without a token keeps its value.
  View<float, 2> sums;

  // CPU only.
  View<const float, 3> keys;    // [token, kv_head, head_dim] of the chunk, rotated, rounded to the cache's dtype
  View<const float, 3> values;  // [token, kv_head, head_dim] of the chunk
  bool round_to_bf16 = false;   // true: the CPU's matrix tiles, if any, may round queries and probabilities

  // CUDA only.
  // Optional: [prompt_room(rows), query head, head_dim], dense, 16-byte aligned: the queries rounded to the pages'
  // dtype, for cuDNN. Without them the op rounds the queries. Rows after the last one may hold anything.
  const void* rounded_queries = nullptr;
  // Optional, replaces out: [prompt_room(rows), query head, head_dim] of the pages' dtype, dense, 16-byte aligned. The
  // op may also write the rows after the last one.
  void* rounded = nullptr;
  // Optional: gets the logarithm of the sum of exponentials that each softmax divides by, [query head, token], natural.
  // The stream keeps it until its next call. It stays empty if the op returns false.
  View<const float, 2>* lse = nullptr;
  int longest = 0;  // most tokens that the last row sees; 0: unknown, and the op does not use cuDNN
  PromptKernel kernel = PromptKernel::best;
};

// On CUDA it returns false and does nothing for a window, a codec or keys that are rotated on reading. So it does for
// masks with sums, and for shapes that attend_pipelined refuses. PromptKernel::cudnn gives false without cuDNN and for
// masks. The CPU takes everything.
bool attend_prompt(const PromptArgs& a, Workspace& w, Stream s);
void attend_prompt_reference(const PromptArgs& a);  // the CPU's arguments; plain loops, double accumulation

// State of cuDNN on the GPU in use (ops/attend/cudnn_attention.hpp), and the number of chunks that it has attended.
const LibraryState& cudnn_state();
std::int64_t cudnn_chunks();

}  // namespace kvlab::ops
