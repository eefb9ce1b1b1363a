// Declarations that the CUDA kernels of a prompt's attention share.
#pragma once
#include "ops/attend/attend_prompt.hpp"

namespace kvlab::ops {

// Log-sum-exp of a token's scores to base 2. The one of token t and query head h is data[t * row + h * head] * unit.
struct PromptLse {
  const float* data = nullptr;
  std::int64_t row = 0, head = 0;
  float unit = 1;
};

// Computes the outputs with cuDNN, and *lse unless null, in scratch that the stream keeps. False if cuDNN is missing,
// refuses or does not pay; the outputs are then undefined. Takes the shapes of attend_prompt.
bool attend_prompt_cudnn(const PromptArgs& a, float scale, PromptLse* lse, Stream s);

}  // namespace kvlab::ops
