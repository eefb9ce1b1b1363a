#include "model/synthetic.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <kvlab/error.hpp>
#include <map>
#include <utility>

#include "base/fingerprint.hpp"
#include "base/text.hpp"
#include "model/checkpoint_checks.hpp"
#include "model/random_weights.hpp"

namespace kvlab {
namespace {

RopeScaling llama3_scaling(float factor) {
  RopeScaling s;
  s.kind = RopeScaling::Kind::llama3;
  s.factor = factor;
  return s;
}

struct Size {
  int layers, hidden, heads, kv_heads, head_dim, ffn, vocab, context;
};

ModelConfig shape(const char* family, Size s, float theta, float eps) {
  ModelConfig c;
  c.family = family;
  c.layers = s.layers, c.hidden = s.hidden, c.heads = s.heads, c.kv_heads = s.kv_heads, c.head_dim = s.head_dim;
  c.ffn = s.ffn, c.vocab = s.vocab, c.context = s.context;
  c.rope_theta = theta, c.rms_eps = eps;
  return c;
}

// The shapes in the models' config.json.
std::vector<std::pair<std::string, ModelConfig>> make_shapes() {
  std::vector<std::pair<std::string, ModelConfig>> all;
  const auto add = [&](const char* name, ModelConfig c) -> ModelConfig& {
    return all.emplace_back(name, std::move(c)).second;
  };
  constexpr float llama_eps = 1e-5f, qwen_eps = 1e-6f;
  add("llama-3.1-8b", shape("llama", {32, 4096, 32, 8, 128, 14336, 128256, 131072}, 5e5f, llama_eps)).rope_scaling =
      llama3_scaling(8);
  add("llama-3.1-70b", shape("llama", {80, 8192, 64, 8, 128, 28672, 128256, 131072}, 5e5f, llama_eps)).rope_scaling =
      llama3_scaling(8);
  add("llama-3-8b", shape("llama", {32, 4096, 32, 8, 128, 14336, 128256, 8192}, 5e5f, llama_eps));
  add("llama-3-70b", shape("llama", {80, 8192, 64, 8, 128, 28672, 128256, 8192}, 5e5f, llama_eps));
  ModelConfig& small =
      add("llama-3.2-1b", shape("llama", {16, 2048, 32, 8, 64, 8192, 128256, 131072}, 5e5f, llama_eps));
  small.rope_scaling = llama3_scaling(32);
  small.tied_embeddings = true;
  add("llama-2-7b", shape("llama", {32, 4096, 32, 32, 128, 11008, 32000, 4096}, 1e4f, llama_eps));
  // No published model: Llama 3.1 8B with more positions, for times beyond its length.
  add("llama-3.1-8b-256k", shape("llama", {32, 4096, 32, 8, 128, 14336, 128256, 262144}, 5e5f, llama_eps))
      .rope_scaling = llama3_scaling(8);
  add("mistral-7b", shape("mistral", {32, 4096, 32, 8, 128, 14336, 32768, 32768}, 1e6f, llama_eps));
  add("mistral-small-24b", shape("mistral", {40, 5120, 32, 8, 128, 32768, 131072, 32768}, 1e8f, llama_eps));
  add("qwen2.5-7b", shape("qwen2", {28, 3584, 28, 4, 128, 18944, 152064, 131072}, 1e6f, qwen_eps)).qkv_bias = true;
  add("qwen2.5-32b", shape("qwen2", {64, 5120, 40, 8, 128, 27648, 152064, 32768}, 1e6f, qwen_eps)).qkv_bias = true;
  add("qwq-32b", shape("qwen2", {64, 5120, 40, 8, 128, 27648, 152064, 40960}, 1e6f, llama_eps)).qkv_bias = true;
  ModelConfig& half = add("qwen2.5-0.5b", shape("qwen2", {24, 896, 14, 2, 64, 4864, 151936, 32768}, 1e6f, qwen_eps));
  half.qkv_bias = half.tied_embeddings = true;
  add("qwen3-8b", shape("qwen3", {36, 4096, 32, 8, 128, 12288, 151936, 40960}, 1e6f, qwen_eps)).qk_norm = true;
  add("smollm2-135m", shape("llama", {30, 576, 9, 3, 64, 1536, 49152, 8192}, 1e5f, llama_eps)).tied_embeddings = true;
  add("tiny", shape("llama", {2, 64, 4, 2, 16, 128, 512, 4096}, 1e4f, llama_eps));
  add("tiny-wide", shape("llama", {2, 64, 4, 2, 64, 128, 512, 4096}, 1e4f, llama_eps));  // heads that GPU kernels take
  add("tiny-deep", shape("llama", {6, 64, 4, 2, 64, 128, 512, 4096}, 1e4f, llama_eps));
  return all;
}

const std::vector<std::pair<std::string, ModelConfig>>& shapes() {
  static const auto all = make_shapes();
  return all;
}

// A byte is a token. No text contains the other tokens of the vocabulary.
class ByteTokenizer final : public Tokenizer {
 public:
  explicit ByteTokenizer(int vocabulary) {
    vocab_size_ = vocabulary;
    set_id("bytes", static_cast<std::uint64_t>(vocabulary));
  }
  std::string token_bytes(int id) const override {
    check_id(id, 0, "token");
    return id < 256 ? std::string(1, static_cast<char>(id)) : fmt::format(" #{}", id);
  }

 protected:
  void encode_plain(std::string_view text, bool, std::vector<int>& out) const override {
    for (const char c : text) out.push_back(static_cast<unsigned char>(c));
  }
};

class SyntheticCheckpoint final : public Checkpoint {
 public:
  SyntheticCheckpoint(const std::string& name, const ModelConfig& config) : where_(synthetic_prefix + name) {
    config_ = config;
    tokenizer_ = std::make_shared<ByteTokenizer>(config.vocab);
    add_tensors();
    Fingerprint print;
    print.add(where_);
    for (const auto& [tensor, dims] : tensors_) {
      print.add(tensor);
      for (const std::int64_t d : dims) print.add(static_cast<std::uint64_t>(d));
    }
    fingerprint_ = print.hex();
    validate(config_, where_);
    check_tensors(*this, where_);
  }

  bool has(std::string_view name) const override { return tensors_.find(name) != tensors_.end(); }
  std::vector<std::int64_t> shape(std::string_view name) const override { return find(name); }
  std::vector<std::string> names() const override {
    std::vector<std::string> out;
    for (const auto& tensor : tensors_) out.push_back(tensor.first);
    return out;
  }
  std::string stored_type(std::string_view name) const override {
    find(name);
    return "f32";
  }
  void read_rows(std::string_view name, std::int64_t row_begin, std::int64_t row_count, float* out) const override {
    const auto& dims = find(name);
    const std::int64_t columns = dims.back(), rows = dims.size() > 1 ? dims[0] : 1;
    check_rows(name, rows, row_begin, row_count, where_);
    if (const auto random = random_tensor(name)) {
      const auto first = static_cast<std::uint64_t>(row_begin * columns);
      for (std::int64_t i = 0; i < row_count * columns; ++i)
        out[i] = random_weight(random->seed, first + static_cast<std::uint64_t>(i)) * random->scale;
    } else {
      std::fill(out, out + row_count * columns, name.ends_with(".bias") ? 0.f : 1.f);
    }
  }
  std::optional<RandomTensor> random_tensor(std::string_view name) const override {
    const auto& dims = find(name);
    if (dims.size() < 2) return std::nullopt;
    return RandomTensor{Fingerprint().add(where_).add(name).value(), 1 / std::sqrt(static_cast<float>(dims.back()))};
  }

 private:
  const std::vector<std::int64_t>& find(std::string_view name) const {
    const auto it = tensors_.find(name);
    if (it == tensors_.end()) unknown_tensor(name, where_);
    return it->second;
  }

  void add_tensors() {
    const ModelConfig& c = config_;
    const std::int64_t q = std::int64_t{c.heads} * c.head_dim, kv = std::int64_t{c.kv_heads} * c.head_dim;
    tensors_["model.embed_tokens.weight"] = {c.vocab, c.hidden};
    tensors_["model.norm.weight"] = {c.hidden};
    if (!c.tied_embeddings) tensors_["lm_head.weight"] = {c.vocab, c.hidden};
    for (int layer = 0; layer < c.layers; ++layer) {
      const std::string at = fmt::format("model.layers.{}.", layer), a = at + "self_attn.";
      tensors_[at + "input_layernorm.weight"] = tensors_[at + "post_attention_layernorm.weight"] = {c.hidden};
      tensors_[a + "q_proj.weight"] = {q, c.hidden};
      tensors_[a + "k_proj.weight"] = tensors_[a + "v_proj.weight"] = {kv, c.hidden};
      tensors_[a + "o_proj.weight"] = {c.hidden, q};
      tensors_[at + "mlp.gate_proj.weight"] = tensors_[at + "mlp.up_proj.weight"] = {c.ffn, c.hidden};
      tensors_[at + "mlp.down_proj.weight"] = {c.hidden, c.ffn};
      if (c.qkv_bias) {
        tensors_[a + "q_proj.bias"] = {q};
        tensors_[a + "k_proj.bias"] = tensors_[a + "v_proj.bias"] = {kv};
      }
      if (c.qk_norm) tensors_[a + "q_norm.weight"] = tensors_[a + "k_norm.weight"] = {c.head_dim};
    }
  }

  std::string where_;
  std::map<std::string, std::vector<std::int64_t>, std::less<>> tensors_;
};

}  // namespace

const std::vector<std::string>& synthetic_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> out;
    for (const auto& shape : shapes()) out.push_back(shape.first);
    return out;
  }();
  return names;
}

std::unique_ptr<Checkpoint> open_synthetic(const std::string& name) {
  for (const auto& [known, config] : shapes())
    if (known == name) return std::make_unique<SyntheticCheckpoint>(name, config);
  throw Error(Errc::model,
              fmt::format("got synthetic model '{}', wanted one of: {}{}", name, join(synthetic_names()),
                          did_you_mean(name, synthetic_names())),
              synthetic_prefix + name);
}

}  // namespace kvlab
