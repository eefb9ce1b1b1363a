// cos and sin of ranks 0 .. count - 1, which all layers and calls share. The cache_relative regime rotates every key on
// every read.
#pragma once
#include <kvlab/kv.hpp>

#include <memory>
#include <vector>

namespace kvlab::ops {

struct RopeRows {
  std::vector<float> inv_freq;
  float attention_scale = 1;
  int count = 0;
  std::vector<float> cosine, sine;  // [count, head_dim / 2], times attention_scale

  int half() const { return static_cast<int>(inv_freq.size()); }
  const float* cosine_of(int rank) const { return cosine.data() + std::size_t(rank) * inv_freq.size(); }
  const float* sine_of(int rank) const { return sine.data() + std::size_t(rank) * inv_freq.size(); }
};

// Returns tables of at least `count` ranks. Thread-safe; tables grow by doubling and stay for the process.
std::shared_ptr<const RopeRows> rope_rows(const RopeTable& rope, int count);

}  // namespace kvlab::ops
