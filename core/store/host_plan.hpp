// The plans of store_as and encode edits by the CPU's threads: what the kernels of cuda_codecs.cu plan, for comparison.
#pragma once
#include "store/cuda_kernels.hpp"

namespace kvlab::host_plan {

// All pointers are of host memory. Heads take frames in their order, so that threads change nothing.
void levels(const CudaStoreLayer& s, const CudaStoreLevels& a);
void encode(const CudaStoreLayer& s, const CudaStoreEncode& a);

}  // namespace kvlab::host_plan
