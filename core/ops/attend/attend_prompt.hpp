// The forms of prefill_attention and what they share.
#pragma once
#include "ops/attend/attend.hpp"
#include "ops/linear/linear_kernels.hpp"

namespace kvlab::ops {

void check_prefill(const PrefillArgs& a, const char* op);  // shapes and strides; Errc::internal or unsupported
float prefill_scale(const PrefillArgs& a);                 // softmax_scale, or its default

// With operands rounded to bf16, whatever the kernel that multiplies them.
void prefill_attention_bf16(const PrefillArgs& a, Workspace& w, Stream s, gemm::PairProduct product);

}  // namespace kvlab::ops
