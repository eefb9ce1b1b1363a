// The ways of attend on CUDA: the pipelined kernel and the one for everything else.
#pragma once
#include "ops/attend/attend.hpp"

namespace kvlab::ops {

// Rows of bf16 or f16 in pages of 8, 16, 32 or 64 tokens, head_dim 64, 96, 128 or 256, groups up to 16; with
// cache_relative not head_dim 96. No list of tokens: its copies are of whole pages.
bool attend_pipelined(const AttendArgs& a);
// Any codec, head_dim, page size, group and regime, lists of pages and of tokens. Parts are cut by the room that the
// table and a list of tokens have, not by what is in them.
void attend_any_cuda(const AttendArgs& a, Stream s);

}  // namespace kvlab::ops
