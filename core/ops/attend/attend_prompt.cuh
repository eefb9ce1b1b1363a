// What the kernels of a prompt's attention share.
#pragma once
#include "ops/attend/attend_prompt.hpp"

namespace kvlab::ops {

// Log-sum-exp of a row's scores: data[row * row_stride + head * head_stride] * unit, to base 2.
struct PromptLse {
  const float* data = nullptr;
  std::int64_t row = 0, head = 0;
  float unit = 1;
};

// The outputs by cuDNN, and *lse unless null (in scratch that the stream keeps). False, and nothing of use done, where
// it is not there or not worth it. Shapes are those that attend_prompt takes.
bool attend_prompt_cudnn(const PromptArgs& a, float scale, PromptLse* lse, Stream s);

}  // namespace kvlab::ops
