// A model on disk, whatever its format: configuration, weights under their Hugging Face names, tokenizer.
#pragma once
#include <kvlab/dtype.hpp>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/config.hpp"
#include "model/tokenizer.hpp"

namespace kvlab {

// A tensor whose element i is random_weight(seed, i) * scale (model/random_weights.hpp).
struct RandomTensor {
  std::uint64_t seed;
  float scale;
};

// Names: "model.embed_tokens.weight", "model.layers.N.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight"
// (has() is false if it is tied), q_norm, k_norm and biases alike. A projection is [out, in], row-major. Q and K rows
// are in the half-split order of RoPE (pairs i, i + head_dim / 2), even if the file holds them interleaved. Reads are
// thread-safe. Errc::model for an unknown name or rows outside the tensor.
class Checkpoint {
 public:
  virtual ~Checkpoint() = default;
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;

  const ModelConfig& config() const { return config_; }
  std::shared_ptr<const Tokenizer> tokenizer() const { return tokenizer_; }  // null: the files hold none

  // Hash over all files that were read, 16 hex digits: weights, configuration, tokenizer, chat template. The folder
  // they lie in is no part of it.
  const std::string& fingerprint() const { return fingerprint_; }

  virtual bool has(std::string_view name) const = 0;
  virtual std::vector<std::int64_t> shape(std::string_view name) const = 0;
  virtual std::vector<std::string> names() const = 0;  // sorted
  // How the file stores it: "f32", "bf16", "q4_1" ...
  virtual std::string stored_type(std::string_view name) const = 0;
  // Rows [row_begin, row_begin + row_count) as f32 into out[row_count * columns]; a 1-D tensor is one row.
  virtual void read_rows(std::string_view name, std::int64_t row_begin, std::int64_t row_count, float* out) const = 0;
  std::vector<float> read(std::string_view name) const;  // the whole tensor
  // The same for the weights of a model: NonFinite (Errc::model) if a number is not finite in the dtype.
  void read_weights(std::string_view name, std::int64_t row_begin, std::int64_t row_count, DType dtype,
                    float* out) const;
  std::vector<float> read_weights(std::string_view name) const;  // the whole tensor, in f32
  // The numbers of a synthetic model's tensor, so that a device can make them in place; empty for weights of a file.
  virtual std::optional<RandomTensor> random_tensor(std::string_view /*name*/) const { return std::nullopt; }

 protected:
  Checkpoint() = default;
  ModelConfig config_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::string fingerprint_;
};

// A .gguf file, or a folder with config.json, *.safetensors (one file or shards with their index) and, if it has a
// tokenizer, tokenizer.json or tokenizer.model. Checks the configuration and that every tensor the family needs is
// there with the right shape. Errc::model, Errc::tokenizer, Errc::io.
std::unique_ptr<Checkpoint> open_checkpoint(const std::filesystem::path& path);

}  // namespace kvlab
