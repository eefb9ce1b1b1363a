// Reduces the scores of a KV head's query heads to one score.
#pragma once
#include <kvlab/kv.hpp>

#include <cstdint>

namespace kvlab::ops {

// out[i] = rule over g of in[g * stride + i], i < n. softmax_mean takes the softmax of softmax_scale * in over the n
// entries of each query head, then the mean. out may not overlap in.
void reduce_group(const float* in, std::int64_t stride, int group, int n, GroupRule rule, float softmax_scale,
                  float* out);

// out = n numbers pooled with stride 1: average or max. in[-kernel / 2 .. n + kernel / 2) must be readable.
void pool_row(const float* in, int n, Pooling kind, int kernel, float* out);

}  // namespace kvlab::ops
