#include "base/tensor_map.hpp"

#include "base/cuda.cuh"

namespace kvlab::cuda {

CUtensorMap matrix_map(const void* matrix, bool half, std::int64_t rows, std::int64_t columns, std::int64_t row_stride,
                       int box_rows) {
  static void* const encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found),
          "cuTensorMapEncodeTiled");
    return entry;
  }();
  if (!encode)
    throw Error(Errc::device, "got a driver without cuTensorMapEncodeTiled, wanted CUDA 12 or newer", "CUDA");
  CUtensorMap map;
  const cuuint64_t extent[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)},
                   stride[] = {static_cast<cuuint64_t>(row_stride) * 2};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_rows)}, step[] = {1, 1};
  const CUresult status = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
      &map, half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(matrix),
      extent, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    throw Error(Errc::device,
                "got error " + std::to_string(status) + " for a map of a " + std::to_string(rows) + " x " +
                    std::to_string(columns) + " matrix",
                "cuTensorMapEncodeTiled");
  return map;
}

}  // namespace kvlab::cuda
