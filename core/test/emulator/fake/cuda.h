// Stands in for the driver's header: maps for bulk copies.
#pragma once
#include <cuda_runtime.h>

using cuuint64_t = std::uint64_t;
using cuuint32_t = std::uint32_t;
enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE = 0 };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_128B = 3 };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_NONE = 0 };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0 };

struct alignas(64) CUtensorMap {
  emulator::Box box;
};

// Enforces CUDA's rules for 2-D maps of 16-bit elements with 128-byte swizzle.
inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* base,
                                       const cuuint64_t* extent, const cuuint64_t* stride, const cuuint32_t* box,
                                       const cuuint32_t* step, CUtensorMapInterleave, CUtensorMapSwizzle,
                                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  const bool valid = rank == 2 && reinterpret_cast<std::uintptr_t>(base) % 16 == 0 && extent[0] > 0 && extent[1] > 0 &&
                     extent[0] <= 1ull << 32 && extent[1] <= 1ull << 32 && stride[0] % 16 == 0 &&
                     stride[0] < 1ull << 40 && box[0] == emulator::box_columns && box[1] > 0 && box[1] <= 256 &&
                     step[0] == 1 && step[1] == 1;
  if (!valid) return CUDA_ERROR_INVALID_VALUE;
  map->box = {static_cast<const std::byte*>(base), static_cast<std::int64_t>(extent[1]),
              static_cast<std::int64_t>(extent[0]), static_cast<std::int64_t>(stride[0] / 2), static_cast<int>(box[1])};
  return CUDA_SUCCESS;
}

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0 };
constexpr int cudaEnableDefault = 0;
inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** entry, unsigned, int,
                                                    cudaDriverEntryPointQueryResult*) {
  *entry = reinterpret_cast<void*>(&cuTensorMapEncodeTiled);
  return cudaSuccess;
}
