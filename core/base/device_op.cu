#include "base/device_op.hpp"

#include "base/cuda_build.hpp"

const kvlab::CudaOpEntry* kvlab::announced_cuda_ops = nullptr;

extern "C" const char* kvlab_cuda_build() { return KVLAB_CUDA_BUILD; }
