// PromptMask in kernels.
#pragma once
#include <kvlab/prompt_mask.hpp>

namespace kvlab::ops {

__device__ __forceinline__ bool hides(const PromptMask& m, int position, int own) {
  return m.window > 0 && position >= m.sinks && position <= own - m.window;
}

}  // namespace kvlab::ops
