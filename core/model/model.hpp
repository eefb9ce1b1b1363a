// A Llama-family model in memory, ready to run: weights packed for the GEMMs, norms and biases in f32.
#pragma once
#include <kvlab/kv.hpp>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "model/checkpoint.hpp"
#include "ops/linear/linear.hpp"

namespace kvlab {

struct CudaModel;  // model/cuda_model.hpp

struct ModelLayer {
  std::vector<float> input_norm, post_norm;  // [hidden]
  ops::Linear qkv;                           // rows: queries, keys, values
  std::vector<float> qkv_bias;               // empty or [rows of qkv]
  std::vector<float> query_norm, key_norm;   // empty or [head_dim]
  ops::Linear output;                        // [hidden, heads * head_dim]
  std::vector<float> output_bias;            // empty or [hidden]
  ops::Linear gate_up;                       // rows: gate, up
  ops::Linear down;                          // [hidden, ffn]
};

struct Model {
  ModelConfig config;
  DType dtype = DType::bf16;
  std::string name, fingerprint;
  bool synthetic = false;  // random weights
  std::shared_ptr<const Tokenizer> tokenizer;
  std::vector<float> inv_freq;  // [head_dim / 2]
  std::vector<ModelLayer> layers;
  std::vector<float> final_norm;          // [hidden]
  ops::Linear head;                       // [vocab, hidden]
  ops::Linear embedding;                  // empty when tied; head serves then
  std::int64_t weight_bytes = 0;          // packed
  std::shared_ptr<const CudaModel> cuda;  // the weights of a model loaded for CUDA; those above are empty then

  void embed(int token, float* out) const { (config.tied_embeddings ? head : embedding).row(token, out); }
  RopeTable rope() const { return {inv_freq.data(), config.head_dim, 1.f}; }
};

// A Model without its weights, which serves every check before work. Errc::unsupported for a dtype that cannot run on
// the device: the CPU takes f32 and bf16, CUDA bf16 and f16.
std::shared_ptr<Model> model_outline(const Checkpoint& checkpoint, DType dtype, const std::string& name,
                                     Device device = Device::cpu);

// Reads each tensor once, block by block. Throws as model_outline and the readers do. NonFinite names the tensor;
// std::bad_alloc if the weights do not fit.
std::shared_ptr<const Model> load_model(const Checkpoint& checkpoint, DType dtype, const std::string& name,
                                        Device device = Device::cpu);

}  // namespace kvlab
