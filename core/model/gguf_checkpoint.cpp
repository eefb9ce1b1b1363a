#include "model/gguf_checkpoint.hpp"

#include <fmt/format.h>

#include <kvlab/error.hpp>
#include <limits>

#include "base/content_hash.hpp"
#include "model/checkpoint_checks.hpp"
#include "model/gguf.hpp"
#include "model/tokenizer_files.hpp"

namespace kvlab {
namespace {

// "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"; a tensor that is no weight of the families we run
// keeps its name.
std::string hugging_face_name(std::string_view name) {
  if (name == "token_embd.weight") return "model.embed_tokens.weight";
  if (name == "output_norm.weight") return "model.norm.weight";
  if (name == "output.weight") return "lm_head.weight";
  static constexpr std::pair<std::string_view, std::string_view> parts[] = {
      {"attn_norm", "input_layernorm"},    {"ffn_norm", "post_attention_layernorm"},
      {"attn_q", "self_attn.q_proj"},      {"attn_k", "self_attn.k_proj"},
      {"attn_v", "self_attn.v_proj"},      {"attn_output", "self_attn.o_proj"},
      {"attn_q_norm", "self_attn.q_norm"}, {"attn_k_norm", "self_attn.k_norm"},
      {"ffn_gate", "mlp.gate_proj"},       {"ffn_up", "mlp.up_proj"},
      {"ffn_down", "mlp.down_proj"}};
  if (!name.starts_with("blk.")) return std::string(name);
  const auto number_end = name.find('.', 4), part_end = name.rfind('.');
  if (number_end == std::string_view::npos || part_end <= number_end) return std::string(name);
  const std::string_view layer = name.substr(4, number_end - 4), suffix = name.substr(part_end);
  const std::string_view part = name.substr(number_end + 1, part_end - number_end - 1);
  if (suffix != ".weight" && suffix != ".bias") return std::string(name);
  for (const auto& [gguf, hugging_face] : parts)
    if (part == gguf) return fmt::format("model.layers.{}.{}{}", layer, hugging_face, suffix);
  return std::string(name);
}

constexpr const char* rope_factors = "rope_freqs.weight";  // part of the configuration

class GgufCheckpoint final : public Checkpoint {
 public:
  explicit GgufCheckpoint(const std::filesystem::path& path) : file_(path) {
    for (const auto& [name, tensor] : file_.tensors())
      if (name != rope_factors && !tensors_.emplace(hugging_face_name(name), &tensor).second)
        throw Error(Errc::model, "got the tensor under two names, wanted it once", file_.where() + ": " + name);
    read_config();
    validate(config_, file_.where());
    check_tensors(*this, file_.where());
    tokenizer_ = tokenizer_from_gguf(file_);
    check_tokenizer(tokenizer_.get(), config_, file_.where());
    if (tokenizer_ != nullptr) {
      config_.bos_id = tokenizer_->bos_id();
      config_.eos_ids = tokenizer_->eos_ids();
    }
    fingerprint_ = content_hashes().of(path);
  }

  bool has(std::string_view name) const override { return tensors_.find(name) != tensors_.end(); }

  std::vector<std::int64_t> shape(std::string_view name) const override { return find(name).shape; }

  std::vector<std::string> names() const override {
    std::vector<std::string> out;
    for (const auto& [name, tensor] : tensors_) out.push_back(name);
    return out;
  }

  std::string stored_type(std::string_view name) const override { return name_of(find(name).type); }

  void read_rows(std::string_view name, std::int64_t row_begin, std::int64_t row_count, float* out) const override {
    const StoredTensor& tensor = find(name);
    const bool permuted = interleaved_ && (name.ends_with("q_proj.weight") || name.ends_with("k_proj.weight"));
    const bool permuted_bias = interleaved_ && (name.ends_with("q_proj.bias") || name.ends_with("k_proj.bias"));
    check_rows(name, tensor.rows(), row_begin, row_count, file_.where());
    const BlockShape block = block_of(tensor.type);
    const std::int64_t columns = tensor.columns(), row_bytes = columns / block.elements * block.bytes;
    if (permuted) {
      for (std::int64_t i = 0; i < row_count; ++i)
        dequantize(tensor.type, tensor.data + stored_row(row_begin + i) * row_bytes, columns, out + i * columns);
    } else if (permuted_bias && row_count == 1) {
      std::vector<float> stored(static_cast<std::size_t>(columns));
      dequantize(tensor.type, tensor.data, columns, stored.data());
      for (std::int64_t i = 0; i < columns; ++i) out[i] = stored[static_cast<std::size_t>(stored_row(i))];
    } else {
      dequantize(tensor.type, tensor.data + row_begin * row_bytes, row_count * columns, out);
    }
  }

 private:
  const StoredTensor& find(std::string_view name) const {
    const auto it = tensors_.find(name);
    if (it == tensors_.end()) unknown_tensor(name, file_.where());
    return *it->second;
  }

  // GGUF's llama architecture stores the rows of a head as pairs (0, D/2, 1, D/2 + 1, ...), ready for interleaved RoPE.
  std::int64_t stored_row(std::int64_t row) const {
    const std::int64_t dim = config_.head_dim, in = row % dim, half = dim / 2;
    return row - in + (in < half ? 2 * in : 2 * (in - half) + 1);
  }

  int size(const std::string& key, std::optional<int> otherwise = {}) const {
    const auto value = file_.integer(key);
    if (!value && otherwise) return *otherwise;
    if (!value) throw Error(Errc::model, "got no such key, wanted an integer", file_.where() + ": " + key);
    if (*value < 0 || *value > std::numeric_limits<int>::max())
      throw Error(Errc::model, fmt::format("got {}, wanted 0 to 2147483647", *value), file_.where() + ": " + key);
    return static_cast<int>(*value);
  }

  void read_config() {
    const std::string arch(file_.text("general.architecture").value_or(""));
    if (arch != "llama" && arch != "qwen2" && arch != "qwen3" && arch != "mistral")
      throw Error(Errc::unsupported, fmt::format("got architecture '{}', wanted llama, qwen2 or qwen3", arch),
                  file_.where() + ": general.architecture");
    const auto key = [&](const char* name) { return arch + "." + name; };
    ModelConfig& c = config_;
    c.family = arch;
    interleaved_ = arch == "llama" || arch == "mistral";
    c.layers = size(key("block_count"));
    c.context = size(key("context_length"));
    c.hidden = size(key("embedding_length"));
    c.ffn = size(key("feed_forward_length"));
    c.heads = size(key("attention.head_count"));
    c.kv_heads = size(key("attention.head_count_kv"), c.heads);
    c.head_dim = size(key("attention.key_length"), c.heads > 0 ? c.hidden / c.heads : 0);
    c.sliding_window = size(key("attention.sliding_window"), 0);
    c.rope_theta = static_cast<float>(file_.number(key("rope.freq_base")).value_or(10000));
    c.rms_eps = static_cast<float>(file_.number(key("attention.layer_norm_rms_epsilon")).value_or(1e-5));
    const auto same = [&](const std::string& name, std::int64_t value, std::int64_t wanted) {
      if (value != wanted)
        throw Error(Errc::unsupported, fmt::format("got {}, wanted {}", value, wanted), file_.where() + ": " + name);
    };
    same(key("rope.dimension_count"), size(key("rope.dimension_count"), c.head_dim), c.head_dim);
    same(key("attention.value_length"), size(key("attention.value_length"), c.head_dim), c.head_dim);
    same(key("expert_count"), size(key("expert_count"), 0), 0);
    read_rope_scaling(key("rope.scaling."));
    const auto embedding = tensors_.find("model.embed_tokens.weight");
    if (embedding == tensors_.end() || embedding->second->shape.size() != 2)
      throw Error(Errc::model, "got no such matrix, wanted the token embedding", file_.where() + ": token_embd.weight");
    if (embedding->second->shape[0] > std::numeric_limits<int>::max())
      throw Error(Errc::model, "got too many rows, wanted a vocabulary", file_.where() + ": token_embd.weight");
    c.vocab = static_cast<int>(embedding->second->shape[0]);
    c.tied_embeddings = !has("lm_head.weight");
    c.qkv_bias = has("model.layers.0.self_attn.q_proj.bias");
    c.o_bias = has("model.layers.0.self_attn.o_proj.bias");
    c.qk_norm = has("model.layers.0.self_attn.q_norm.weight");
  }

  void read_rope_scaling(const std::string& prefix) {
    const std::string type(file_.text(prefix + "type").value_or("none"));
    if (type == "linear") {
      config_.rope_scaling.kind = RopeScaling::Kind::linear;
      config_.rope_scaling.factor = static_cast<float>(file_.number(prefix + "factor").value_or(1));
    } else if (type != "none") {
      throw Error(Errc::unsupported, fmt::format("got rope scaling '{}', wanted none or linear", type),
                  file_.where() + ": " + prefix + "type");
    }
    const auto factors = file_.tensors().find(rope_factors);
    if (factors == file_.tensors().end()) return;
    const StoredTensor& tensor = factors->second;
    if (tensor.shape.size() != 1 || tensor.columns() != config_.head_dim / 2)
      throw Error(Errc::model, "got another shape, wanted head_dim / 2 numbers", file_.where() + ": " + rope_factors);
    config_.rope_scaling.kind = RopeScaling::Kind::factors;
    config_.rope_scaling.factors.resize(static_cast<std::size_t>(tensor.columns()));
    dequantize(tensor.type, tensor.data, tensor.columns(), config_.rope_scaling.factors.data());
  }

  GgufFile file_;
  bool interleaved_ = false;
  std::map<std::string, const StoredTensor*, std::less<>> tensors_;
};

}  // namespace

std::unique_ptr<Checkpoint> open_gguf(const std::filesystem::path& path) {
  return std::make_unique<GgufCheckpoint>(path);
}

}  // namespace kvlab
