// Number formats of weight files, plain types and GGML's blocks, and their conversion to f32.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kvlab {

enum class StoredType : std::uint8_t { f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k };

struct BlockShape {
  int elements;  // values in one block
  int bytes;     // of one block
};

BlockShape block_of(StoredType type);
const char* name_of(StoredType type);

// Converts `count` values, a multiple of the block's elements, to f32. `blocks` needs no alignment.
void dequantize(StoredType type, const std::byte* blocks, std::int64_t count, float* out);

}  // namespace kvlab
