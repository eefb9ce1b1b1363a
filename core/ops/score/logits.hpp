// Calls of pooled_logits on CUDA that wait for those of other layers, and limits.
#pragma once
#include <kvlab/ops.hpp>

#include <vector>

namespace kvlab::ops {

inline constexpr int most_logit_kernel = 1023, most_logit_group = 64;

// By what ops on logits, and on their scores, divide the blocks of a row where a launch has many rows.
constexpr int blocks_fewer(unsigned rows) { return static_cast<int>(rows < 16 ? 1 : rows < 32 ? 2 : 4); }

struct PooledLogits {
  PagedKv kv;
  HeadLogits logits;
  VotePooling pooling;
  Scores out;
  Stream stream = Stream::cpu();

  const void* output() const { return out.data; }
  static void run(const std::vector<PooledLogits>& calls);
};
// Throws for arguments that pooled_logits does not take.
void check_logits(const PagedKv& kv, const HeadLogits& logits, const VotePooling& pooling, View<const float, 3> out,
                  const char* op, Stream s);

// CUDA only. Calls that differ in nothing but memory, and in heads that have logits, share launches.
void pooled_in_layers(const std::vector<PooledLogits>& calls);

}  // namespace kvlab::ops
