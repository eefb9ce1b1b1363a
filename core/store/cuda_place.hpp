// The plan of place edits, for cuda_store.cu.
#pragma once
#include "store/cuda_kernels.hpp"

namespace kvlab {

void plan_place(const CudaStoreLayer& s, const CudaStorePlace& a, void* stream);

}  // namespace kvlab
