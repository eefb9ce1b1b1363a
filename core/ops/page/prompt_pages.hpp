// Copies a layer's pages for a prompt's attention, on CUDA alone.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>

#include <cstdint>

namespace kvlab::ops {

// Copies one layer of one sequence to pages without a codec. Tokens before the chunk are decoded and, in the
// cache_relative regime, their keys rotated by rank. The chunk's tokens come from `keys` and `values`, which no codec
// has rounded. All pointers but the layouts are device memory.
struct PromptPagesArgs {
  PagedKv kv;                   // one row; the chunk is its last tokens
  int tokens = 0;               // tokens of the chunk
  const float* keys = nullptr;  // [token, kv_head, head_dim] of the chunk, rotated
  const float* values = nullptr;
  std::int64_t key_stride = 0, value_stride = 0;   // floats from token to token
  const float *cosine = nullptr, *sine = nullptr;  // [angles, head_dim / 2]
  int angles = 0;
  PageLayout layout;            // layout of `frames`: no codec, no token state
  int pages = 0;                // pages per KV head in `frames`
  std::byte* frames = nullptr;  // [kv_head, page]
  PageEntry* table = nullptr;   // [kv_head, page]
};

void prompt_pages(const PromptPagesArgs& a, Stream s);  // Errc::unsupported for a CPU stream

}  // namespace kvlab::ops
