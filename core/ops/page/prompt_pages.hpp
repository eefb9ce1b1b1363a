// A copy of a layer for a prompt's attention, on CUDA alone.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>

#include <cstdint>

namespace kvlab::ops {

// A layer of one sequence as a prompt's attention reads it: what came before decoded and turned by its rank
// (RopeRegime::cache_relative), the chunk itself as it was before the codec. Device memory but the layouts.
struct PromptPagesArgs {
  PagedKv kv;                   // one row; the chunk is its last tokens
  int tokens = 0;               // of the chunk
  const float* keys = nullptr;  // [token, kv_head, head_dim], turned
  const float* values = nullptr;
  std::int64_t key_stride = 0, value_stride = 0;   // of a token
  const float *cosine = nullptr, *sine = nullptr;  // [angles, head_dim / 2]
  int angles = 0;
  PageLayout layout;            // of what comes out: no codec, no token state
  int pages = 0;                // of a head
  std::byte* frames = nullptr;  // [kv_head, page]
  PageEntry* table = nullptr;   // [kv_head, page]
};

void prompt_pages(const PromptPagesArgs& a, Stream s);  // Errc::unsupported for a CPU stream

}  // namespace kvlab::ops
