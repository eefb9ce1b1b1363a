#include <fmt/format.h>

#include "model/hf_checkpoint.hpp"
#include "model/json.hpp"

namespace kvlab {
namespace {

void unsupported(const JsonReader& json, const char* key, const std::string& got, const std::string& wanted) {
  throw Error(Errc::unsupported, "got " + got + ", wanted " + wanted, json.where(key));
}

// Files have "rope_scaling" beside "rope_theta", or both in "rope_parameters" (transformers 5).
void read_rope(const JsonReader& json, ModelConfig& c) {
  c.rope_theta = static_cast<float>(json.number("rope_theta", 10000));
  const char* key = json.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  if (!json.has(key)) return;
  const JsonReader rope = json.object(key);
  c.rope_theta = static_cast<float>(rope.number("rope_theta", c.rope_theta));
  if (rope.number("partial_rotary_factor", 1) != 1) unsupported(rope, "partial_rotary_factor", "a part", "1");
  const std::string type = rope.text("rope_type", rope.text("type", "default"));
  RopeScaling& r = c.rope_scaling;
  if (type == "linear") {
    r.kind = RopeScaling::Kind::linear;
    r.factor = static_cast<float>(rope.number("factor"));
  } else if (type == "llama3") {
    r.kind = RopeScaling::Kind::llama3;
    r.factor = static_cast<float>(rope.number("factor"));
    r.low_freq_factor = static_cast<float>(rope.number("low_freq_factor"));
    r.high_freq_factor = static_cast<float>(rope.number("high_freq_factor"));
    r.original_context = rope.size("original_max_position_embeddings");
  } else if (type != "default") {
    unsupported(rope, "rope_type", fmt::format("'{}'", type), "default, linear or llama3");
  }
}

void read_sliding_window(const JsonReader& json, ModelConfig& c) {
  const bool qwen = c.family.starts_with("qwen");
  if (!json.has("sliding_window") || (qwen && !json.boolean("use_sliding_window", false))) return;
  // Qwen's first max_window_layers layers attend to everything, the others to the window.
  const int full_layers = qwen ? json.size("max_window_layers", c.layers) : 0;
  if (full_layers >= c.layers) return;
  if (full_layers > 0) unsupported(json, "max_window_layers", std::to_string(full_layers), "0, or all layers");
  c.sliding_window = json.size("sliding_window");
}

}  // namespace

ModelConfig read_hf_config(std::string_view text, const std::string& where) {
  const Json document = parse_json(text, where, Errc::model);
  const JsonReader json(document, where, Errc::model);
  ModelConfig c;
  c.family = json.text("model_type");
  if (c.family != "llama" && c.family != "mistral" && c.family != "qwen2" && c.family != "qwen3")
    unsupported(json, "model_type", fmt::format("'{}'", c.family), "llama, mistral, qwen2 or qwen3");
  for (const char* key : {"quantization_config", "num_local_experts"})
    if (json.has(key)) unsupported(json, key, "it", "a dense model in F32, F16 or BF16");
  if (const std::string act = json.text("hidden_act", "silu"); act != "silu")
    unsupported(json, "hidden_act", "'" + act + "'", "'silu'");
  if (json.boolean("mlp_bias", false)) unsupported(json, "mlp_bias", "true", "false");
  if (json.number("partial_rotary_factor", 1) != 1) unsupported(json, "partial_rotary_factor", "a part", "1");
  c.layers = json.size("num_hidden_layers");
  c.hidden = json.size("hidden_size");
  c.heads = json.size("num_attention_heads");
  c.kv_heads = json.size("num_key_value_heads", c.heads);
  c.head_dim = json.size("head_dim", c.heads > 0 ? c.hidden / c.heads : 0);
  c.ffn = json.size("intermediate_size");
  c.vocab = json.size("vocab_size");
  c.context = json.size("max_position_embeddings", 2048);
  c.rms_eps = static_cast<float>(json.number("rms_norm_eps", 1e-6));
  c.tied_embeddings = json.boolean("tie_word_embeddings", false);
  const bool bias = json.boolean("attention_bias", false);
  c.qkv_bias = c.family == "qwen2" || bias;
  c.o_bias = c.family != "qwen2" && bias;
  c.qk_norm = c.family == "qwen3";
  read_rope(json, c);
  read_sliding_window(json, c);
  const auto ids = [&](const char* key) {
    std::vector<int> out;
    const Json* value = json.find(key);
    if (value == nullptr) return out;
    for (const Json& id : value->is_array() ? *value : Json::array({*value})) {
      if (!id.is_number_integer() || id.get<std::int64_t>() < 0 || id.get<std::int64_t>() >= c.vocab)
        json.refuse(key, id.dump(), "token ids");
      out.push_back(id.get<int>());
    }
    return out;
  };
  if (const std::vector<int> bos = ids("bos_token_id"); !bos.empty()) c.bos_id = bos[0];
  c.eos_ids = ids("eos_token_id");
  return c;
}

}  // namespace kvlab
