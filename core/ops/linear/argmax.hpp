// The likeliest token of each row, on CUDA alone. On the CPU the executor searches the logits itself.
#pragma once
#include <kvlab/stream.hpp>

#include <cstdint>

namespace kvlab::ops {

// index[row] = place of the largest of x[row, 0..n), the lowest of equal ones. It is -1 if one of them is NaN or
// infinite.
struct ArgmaxArgs {
  const float* x = nullptr;  // [rows, x_stride]
  std::int64_t rows = 0, n = 0, x_stride = 0;
  std::int32_t* index = nullptr;  // [rows]
  // Optional [rows]: a row whose flag is not 0 gets index -1. The kernel then zeroes the flag.
  std::int32_t* nonfinite = nullptr;
};
void argmax(const ArgmaxArgs& a, Stream s);  // Errc::unsupported for a CPU stream

}  // namespace kvlab::ops
