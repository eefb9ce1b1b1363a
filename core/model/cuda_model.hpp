// A model's weights in GPU memory, as ops::linear and ops::embed take them.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "base/stream_memory.hpp"
#include "model/checkpoint.hpp"

namespace kvlab {

struct CudaMatrix {
  StreamMemory memory;  // [n, k] dense
  std::int64_t n = 0, k = 0;
};

struct CudaLayer {
  StreamMemory input_norm, post_norm;  // f32 [hidden]
  CudaMatrix qkv, output, gate_up, down;
  StreamMemory qkv_bias, output_bias;  // f32 or empty
  StreamMemory query_norm, key_norm;   // f32 [head_dim] or empty
};

struct CudaModel {
  std::vector<CudaLayer> layers;
  StreamMemory final_norm;
  CudaMatrix head, embedding;  // embedding is empty when tied; head serves then
  std::int64_t weight_bytes = 0;
  DType dtype = DType::bf16;  // of all matrices: bf16 or f16

  const CudaMatrix& tokens() const { return embedding.n ? embedding : head; }
};

// Reads each tensor once, block by block, and rounds it to dtype. Errc::model, Errc::device; std::bad_alloc.
std::shared_ptr<const CudaModel> load_cuda_model(const Checkpoint& checkpoint, DType dtype);

}  // namespace kvlab
