// The configuration of a decoder-only transformer of the llama, mistral, qwen2 or qwen3 family.
#pragma once
#include <string>
#include <vector>

namespace kvlab {

// How a model's rotary frequencies were stretched beyond the context it was first trained on.
struct RopeScaling {
  enum class Kind {
    none,
    linear,   // every frequency divided by `factor`
    llama3,   // low frequencies divided by `factor`, high ones kept, a ramp between (Llama 3.1)
    factors,  // frequency i divided by factors[i] (GGUF's rope_freqs.weight), head_dim / 2 of them
  };
  Kind kind = Kind::none;
  float factor = 1;
  float low_freq_factor = 1, high_freq_factor = 4;  // llama3
  int original_context = 8192;                      // llama3
  std::vector<float> factors;
};

struct ModelConfig {
  std::string family;  // llama | mistral | qwen2 | qwen3
  int layers = 0;
  int hidden = 0;    // width of the residual stream
  int heads = 0;     // query heads
  int kv_heads = 0;  // heads = kv_heads * group
  int head_dim = 0;
  int ffn = 0;  // width of gate and up
  int vocab = 0;
  int context = 0;  // positions the model was made for
  float rope_theta = 10000;
  RopeScaling rope_scaling;
  float rms_eps = 1e-5f;
  bool tied_embeddings = false;  // lm_head.weight is model.embed_tokens.weight
  bool qkv_bias = false;         // q_proj, k_proj and v_proj have biases
  bool o_bias = false;           // o_proj has one
  bool qk_norm = false;          // RMS norm of each query and key head before RoPE (q_norm, k_norm: head_dim weights)
  int sliding_window = 0;        // last positions that a query attends to, itself included; 0 = all
  int bos_id = -1;               // -1 = none
  std::vector<int> eos_ids;      // any of them ends a generation; may be empty

  int group() const { return heads / kv_heads; }
};

// Refuses impossible values by name: Errc::model "got heads 9 with kv_heads 4, wanted ..." at `where`.
void validate(const ModelConfig& config, const std::string& where);

// [head_dim / 2] radians per position of each rotary pair (i, i + head_dim / 2), scaling applied.
std::vector<float> inverse_frequencies(const ModelConfig& config);

}  // namespace kvlab
