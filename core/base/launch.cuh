// Kernels that start before the one in front of them in the stream has ended (programmatic dependent launch): what does
// not depend on it, such as reading weights, overlaps its end. Graphs keep such edges.
#pragma once
#include <utility>

#include "base/cuda.cuh"

namespace kvlab::cuda {

// early: the kernel calls wait_for_predecessor before it touches anything that earlier kernels of the stream write.
// Copies and fills in front of it have ended.
template <class... P, class... A>
void launch(const char* name, void (*kernel)(P...), dim3 grid, dim3 block, std::size_t shared, cudaStream_t stream,
            bool early, A&&... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, std::forward<A>(arguments)...), name);
}

}  // namespace kvlab::cuda
