// Programmatic dependent launch: a kernel may start before the previous kernel of its stream has ended. Work that does
// not depend on that kernel, such as reading weights, overlaps its end. Graphs keep such edges.
#pragma once
#include <utility>

#include "base/cuda.cuh"

namespace kvlab::cuda {

namespace detail {

template <class... P, class... A>
void launch(const char* name, void (*kernel)(P...), unsigned cluster, dim3 grid, dim3 block, std::size_t shared,
            cudaStream_t stream, bool early, A&&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attributes;
  if (cluster > 1) {
    cudaLaunchAttribute& a = attributes[config.numAttrs++];
    a.id = cudaLaunchAttributeClusterDimension;
    a.val.clusterDim.x = cluster, a.val.clusterDim.y = a.val.clusterDim.z = 1;
  }
  if (early) {
    cudaLaunchAttribute& a = attributes[config.numAttrs++];
    a.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    a.val.programmaticStreamSerializationAllowed = 1;
  }
  check(cudaLaunchKernelEx(&config, kernel, std::forward<A>(arguments)...), name);
}

}  // namespace detail

// early: the kernel may start before the previous one has ended. It calls wait_for_predecessor before it touches memory
// that earlier kernels of the stream write. Earlier copies and fills have always ended.
template <class... P, class... A>
void launch(const char* name, void (*kernel)(P...), dim3 grid, dim3 block, std::size_t shared, cudaStream_t stream,
            bool early, A&&... arguments) {
  detail::launch(name, kernel, 1, grid, block, shared, stream, early, std::forward<A>(arguments)...);
}

// The same with `cluster` neighbouring blocks along x that run together and reach each other's shared memory. More than
// 8 need allow_large_clusters.
template <class... P, class... A>
void launch_clusters(const char* name, void (*kernel)(P...), unsigned cluster, dim3 grid, dim3 block,
                     std::size_t shared, cudaStream_t stream, bool early, A&&... arguments) {
  detail::launch(name, kernel, cluster, grid, block, shared, stream, early, std::forward<A>(arguments)...);
}
template <class... P>
void allow_large_clusters(const char* name, void (*kernel)(P...)) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), name);
}

// Clusters of such a launch that an idle device runs at once; 0 if it cannot run one.
template <class... P>
int clusters_at_once(void (*kernel)(P...), unsigned cluster, dim3 block, std::size_t shared) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = cluster;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  if (cudaOccupancyMaxActiveClusters(&count, kernel, &config) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

}  // namespace kvlab::cuda
