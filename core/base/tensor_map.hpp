// Maps for bulk copies (TMA) of boxes of a matrix.
#pragma once
#include <cuda.h>

#include <cstdint>

namespace kvlab::cuda {

// Boxes of box_rows rows (at most 256) of 64 16-bit elements, 128-byte swizzled: 16-byte piece p of row r lies at piece
// p ^ (r % 8) of its 128 bytes when the box begins at a multiple of 1024. What lies outside of the matrix reads as
// zero. matrix 16-byte aligned, row_stride (elements) a multiple of 8.
CUtensorMap matrix_map(const void* matrix, bool half, std::int64_t rows, std::int64_t columns, std::int64_t row_stride,
                       int box_rows);

}  // namespace kvlab::cuda
