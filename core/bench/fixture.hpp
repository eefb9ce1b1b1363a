// A paged cache in SmolLM2-135M's shape for the op cases: one sequence, bf16.
#pragma once
#include <kvlab/kv.hpp>

#include <vector>

#include "base/buffer.hpp"

namespace kvlab::bench {

inline constexpr int layers = 30, query_heads = 9, kv_heads = 3, head_dim = 64, page_size = 16;

// All layers of a sequence of `tokens` tokens; the pages of a head lie in shuffled order.
class Pages {
 public:
  explicit Pages(int tokens, int state_columns = 0);
  PagedKv layer(int l) const;
  int pages() const { return pages_; }

 private:
  int pages_;
  PageLayout layout_;
  Buffer frames_;
  std::vector<PageEntry> entries_;
  std::vector<std::int32_t> length_;
  std::vector<float> inv_freq_;
  std::int32_t slot_ = 0;
};

}  // namespace kvlab::bench
