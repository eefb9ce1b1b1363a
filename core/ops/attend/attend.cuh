// attend's kernels on CUDA: the pipelined kernel and the general kernel.
#pragma once
#include <cuda_runtime.h>

#include "ops/attend/attend.hpp"

namespace kvlab::ops {

// Whether the pipelined kernel takes the arguments. It takes bf16 or f16 rows in pages of 8, 16, 32 or 64 tokens,
// head_dim 64, 96, 128 or 256, and groups up to 16. With cache_relative or a distance to clamp it does not take
// head_dim 96. It takes codes of most codecs (attend_codes.cu) in pages of 16 or 32 tokens, head_dim 64 or 128, groups
// up to 8, without cache_relative or a distance to clamp. It takes a list of tokens in bf16 or f16 rows of 64, 128 or
// 256 elements and groups up to 16, with or without a bias. Such a list goes to the general kernel with cache_relative,
// a distance to clamp, mass, logits to keep or two codecs. A bias without a list does, too.
bool attend_pipelined(const AttendArgs& a);
// The general kernel takes any codec, head_dim, page size, group and regime, and lists of pages and tokens. The
// capacity of the table and of a list of tokens sets the number of parts; their contents do not.
void attend_any_cuda(const AttendArgs& a, Stream s);

// Mass of the pipelined kernel (attend_mass.cu), where it does not add it to token state itself (attend_sums.cuh). It
// writes scores times log2(e) of the tokens that it reads, -inf for those that the window hides. clear_scores writes
// -inf for all others. scores_to_mass makes them probabilities.
void clear_scores(const AttendArgs& a, cudaStream_t stream);
void scores_to_mass(const View<float, 3>& mass, const View<float, 2>& lse, int rows, cudaStream_t stream);
// Logits of a token that one store of the pipelined kernel takes.
int logits_at_once(const HeadLogits& logits);

}  // namespace kvlab::ops
