// Causal attention of one chunk of a prompt, of one sequence, over its past and itself.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>
#include <kvlab/workspace.hpp>

#include <algorithm>
#include <bit>

#include "base/library_state.hpp"

namespace kvlab::ops {

// best: cuDNN where it is there and the chunk is long enough, else our own; cudnn: or nothing.
enum class PromptKernel { best, own, cudnn };

// Rows of a chunk from which on cuDNN is the best, where it is there.
inline constexpr int prompt_cudnn_rows = 512;

// Rows that PromptArgs::rounded and rounded_queries have room for.
constexpr int prompt_room(int rows) {
  const int step = std::max(64, static_cast<int>(std::bit_ceil(static_cast<unsigned>(rows)) / 4));
  return (rows + step - 1) / step * step;
}

struct PromptArgs {
  // CPU: row 0 is the past alone. KV head h has kv.tokens(0, h) tokens of its own (evictions between chunks may leave
  // heads of different lengths).
  // CUDA: row r is the chunk's r-th token. All rows are in the same slot's pages, which have the chunk already. Row r
  // sees what row r - 1 sees and one token more, itself.
  PagedKv kv;
  View<const float, 3> queries;  // [token, query head, head_dim], rotated; CUDA: rows and heads 16-byte aligned
  float softmax_scale = 0;       // 0 = 1 / sqrt(head_dim)
  int window = 0;                // as in AttendArgs, by stored positions; CUDA takes none
  View<float, 3> out;            // [token, query head, head_dim]
  // Optional: [query head, place] sums of the tokens' probabilities, places of the past, then of the chunk. On CUDA a
  // place without a token keeps what it had.
  View<float, 2> sums;

  // CPU.
  View<const float, 3> keys;    // [token, kv_head, head_dim] of the chunk, rotated, rounded to the cache's dtype
  View<const float, 3> values;  // [token, kv_head, head_dim] of the chunk
  int first = 0;                // text position of the chunk's first token
  bool round_to_bf16 = false;   // queries and probabilities may be rounded for matrix tiles, where the CPU has them

  // CUDA.
  // Optional: [prompt_room(rows), query head, head_dim], dense, 16-byte aligned: the queries rounded to the pages'
  // dtype, for cuDNN, which else has them rounded; after the last row is anything.
  const void* rounded_queries = nullptr;
  // In place of out: [prompt_room(rows), query head, head_dim] of the pages' dtype, dense, 16-byte aligned; what
  // follows the last row may be written too.
  void* rounded = nullptr;
  int longest = 0;  // most tokens that the last row sees; 0: the host does not know, and cuDNN is not used
  PromptKernel kernel = PromptKernel::best;
};

// False, and nothing done, for what the CUDA kernels do not take: a window, a codec, keys rotated on reading, shapes
// that attend_pipelined does not take, and PromptKernel::cudnn where it cannot be had. The CPU takes everything.
bool attend_prompt(const PromptArgs& a, Workspace& w, Stream s);
void attend_prompt_reference(const PromptArgs& a);  // the CPU's arguments; plain loops, double accumulation

// cuDNN on the GPU in use (ops/attend/cudnn_attention.hpp), and how many chunks' attention it has done.
const LibraryState& cudnn_state();
std::int64_t cudnn_chunks();

}  // namespace kvlab::ops
