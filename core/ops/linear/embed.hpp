// Rows of a model's embedding, on CUDA alone. On the CPU the embedding is packed (Model::embed).
#pragma once
#include <kvlab/dtype.hpp>
#include <kvlab/stream.hpp>

#include <cstdint>

namespace kvlab::ops {

// out[row, :] f32 = table[token[row], :] of dtype; k a multiple of 8. A token outside [0, vocabulary) gives NaN.
struct EmbedArgs {
  const void* table = nullptr;  // [vocabulary, k]
  DType dtype = DType::bf16;
  std::int64_t vocabulary = 0, k = 0;
  const std::int32_t* token = nullptr;  // [rows], device memory
  std::int64_t rows = 0;
  float* out = nullptr;  // [rows, k]
};
void embed(const EmbedArgs& a, Stream s);  // Errc::unsupported for a CPU stream

}  // namespace kvlab::ops
