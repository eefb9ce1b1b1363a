// attend on CUDA: the pipelined kernel and the one for everything else.
#pragma once
#include <algorithm>
#include <bit>

#include "ops/attend/attend.hpp"

namespace kvlab::ops {

void attend_cuda(const AttendArgs& a, void* stream);
// Rows of bf16 or f16 in pages of 8, 16, 32 or 64 tokens, head_dim 64, 96, 128 or 256, groups up to 16; with
// cache_relative not head_dim 96. No list of tokens: its copies are of whole pages.
bool attend_pipelined(const AttendArgs& a);
// Any codec, head_dim, page size, group and regime, lists of pages and of tokens. Parts are cut by the room that the
// table and a list of tokens have, not by what is in them.
void attend_any_cuda(const AttendArgs& a, void* stream);

// best: cuDNN where it is there and the chunk is long enough, else our own; cudnn: or nothing.
enum class PromptKernel { best, own, cudnn };

// Rows of a chunk from which on cuDNN is the best, where it is there.
inline constexpr int prompt_cudnn_rows = 512;

// Rows that PromptArgs::rounded and rounded_queries have room for.
constexpr int prompt_room(int rows) {
  const int step = std::max(64, static_cast<int>(std::bit_ceil(static_cast<unsigned>(rows)) / 4));
  return (rows + step - 1) / step * step;
}

// A prompt's chunk: row r is its r-th token and sees what row r - 1 sees and one token more, itself.
struct PromptArgs {
  PagedKv kv;                    // every row in the same slot's pages, which have the chunk already
  View<const float, 3> queries;  // [row, query head, head_dim], rotated; rows and heads 16-byte aligned
  // Optional: [prompt_room(rows), query head, head_dim], dense, 16-byte aligned: the queries rounded to the pages'
  // dtype, for cuDNN, which else has them rounded; after the last row is anything.
  const void* rounded_queries = nullptr;
  float softmax_scale = 0;  // 0 = 1 / sqrt(head_dim)
  View<float, 3> out;       // [row, query head, head_dim]
  // In place of out: [prompt_room(rows), query head, head_dim] of the pages' dtype, dense, 16-byte aligned; what
  // follows the last row may be written too.
  void* rounded = nullptr;
  View<float, 2> sums;  // optional: [query head, place] sums of the rows' probabilities; kept where no token is
  int longest = 0;      // most tokens that the last row sees; 0: the host does not know, and cuDNN is not used
  PromptKernel kernel = PromptKernel::best;
};
// false, and nothing done, for what attend_pipelined does not take either, and where PromptKernel::cudnn cannot be had.
bool attend_prompt_cuda(const PromptArgs& a, void* stream);
// How many chunks' attention cuDNN has done.
std::int64_t cudnn_chunks();

}  // namespace kvlab::ops
