// The CPU's forms of attend_prompt and what they share.
#pragma once
#include "ops/attend/attend_prompt.hpp"
#include "ops/linear/linear_kernels.hpp"

namespace kvlab::ops {

void check_prompt(const PromptArgs& a, const char* op);  // shapes and strides; Errc::internal or unsupported
float prompt_scale(const PromptArgs& a);                 // softmax_scale, or its default

// With operands rounded to bf16, whatever the kernel that multiplies them.
void attend_prompt_bf16(const PromptArgs& a, Workspace& w, gemm::PairProduct product);

}  // namespace kvlab::ops
