// Programmatic dependent launch: a kernel may start before the previous kernel of its stream has ended. Work that does
// not depend on that kernel, such as reading weights, overlaps its end. Graphs keep such edges.
#pragma once
#include <utility>

#include "base/cuda.cuh"

namespace kvlab::cuda {

// early: the kernel may start before the previous one has ended. It calls wait_for_predecessor before it touches memory
// that earlier kernels of the stream write. Earlier copies and fills have always ended. So has all that came before a
// predecessor that was not early itself.
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
