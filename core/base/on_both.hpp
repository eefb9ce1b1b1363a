// Marks functions that both devices run: sources of kernels compile them for the GPU, too.
#pragma once

#ifdef __CUDACC__
#include <cuda_runtime.h>
#define KVLAB_ON_BOTH __host__ __device__
#else
#define KVLAB_ON_BOTH
#endif
