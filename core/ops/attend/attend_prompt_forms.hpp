// The CPU's implementations of attend_prompt and their shared checks.
#pragma once
#include "ops/attend/attend_prompt.hpp"
#include "ops/linear/linear_kernels.hpp"

namespace kvlab::ops {

void check_prompt(const PromptArgs& a, const char* op);  // checks shapes and strides; Errc::internal or unsupported
float prompt_scale(const PromptArgs& a);                 // softmax_scale, or its default

// Rounds the operands to bf16, whichever `product` multiplies them.
void attend_prompt_bf16(const PromptArgs& a, Workspace& w, gemm::PairProduct product);

}  // namespace kvlab::ops
