// Maps for bulk copies (TMA) of boxes of a matrix.
#pragma once
#include <cuda.h>

#include <cstdint>

namespace kvlab::cuda {

// A map of boxes of box_rows rows (at most 256) of 64 16-bit elements, 128-byte swizzled. 16-byte piece p of row r lies
// at piece p ^ (r % 8) of the row. For that a box begins at a multiple of 1024. Elements outside the matrix read as
// zero. matrix is 16-byte aligned; row_stride, in elements, is a multiple of 8.
CUtensorMap matrix_map(const void* matrix, bool half, std::int64_t rows, std::int64_t columns, std::int64_t row_stride,
                       int box_rows);

}  // namespace kvlab::cuda
