// attend on CUDA: the pipelined kernel and the one for everything else.
#pragma once
#include "ops/attend.hpp"

namespace kvlab::ops {

void attend_cuda(const AttendArgs& a, void* stream);
// Rows of f32, bf16 or f16 in pages of 8, 16, 32 or 64 tokens, head_dim 64, 96, 128 or 256, groups up to 16, any regime
// but cache_relative.
bool attend_pipelined(const AttendArgs& a);
// Any codec, head_dim, page size, group and regime; plain loops.
void attend_any_cuda(const AttendArgs& a, void* stream);

}  // namespace kvlab::ops
