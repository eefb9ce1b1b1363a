// The smallest model of each format: one layer, width 8, two query heads and one KV head of 4, a vocabulary of 6.
#pragma once
#include <numeric>

#include "test/model/tiny_files.hpp"

namespace kvlab::test {

struct TinyTensor {
  std::string gguf, hugging_face;
  std::vector<std::uint64_t> shape;
};

inline std::vector<TinyTensor> tiny_tensors() {
  const std::string g = "blk.0.", h = "model.layers.0.";
  return {{"token_embd.weight", "model.embed_tokens.weight", {6, 8}},
          {"output_norm.weight", "model.norm.weight", {8}},
          {g + "attn_norm.weight", h + "input_layernorm.weight", {8}},
          {g + "ffn_norm.weight", h + "post_attention_layernorm.weight", {8}},
          {g + "attn_q.weight", h + "self_attn.q_proj.weight", {8, 8}},
          {g + "attn_k.weight", h + "self_attn.k_proj.weight", {4, 8}},
          {g + "attn_v.weight", h + "self_attn.v_proj.weight", {4, 8}},
          {g + "attn_output.weight", h + "self_attn.o_proj.weight", {8, 8}},
          {g + "ffn_gate.weight", h + "mlp.gate_proj.weight", {16, 8}},
          {g + "ffn_up.weight", h + "mlp.up_proj.weight", {16, 8}},
          {g + "ffn_down.weight", h + "mlp.down_proj.weight", {8, 16}}};
}

// 0, 1, 2 ...: a value tells its place in the file.
inline std::vector<float> counting(const std::vector<std::uint64_t>& shape) {
  std::uint64_t n = 1;
  for (const auto d : shape) n *= d;
  std::vector<float> out(n);
  std::iota(out.begin(), out.end(), 0.0f);
  return out;
}

// more: tensors after the model's own.
inline std::string tiny_gguf(const std::string& arch = "llama", const std::vector<TinyTensor>& more = {}) {
  GgufWriter w;
  w.text("general.architecture", arch);
  for (const auto& [key, value] : std::vector<std::pair<std::string, std::uint32_t>>{{"block_count", 1},
                                                                                     {"context_length", 64},
                                                                                     {"embedding_length", 8},
                                                                                     {"feed_forward_length", 16},
                                                                                     {"attention.head_count", 2},
                                                                                     {"attention.head_count_kv", 1}})
    w.number(arch + "." + key, value);
  w.real(arch + ".attention.layer_norm_rms_epsilon", 1e-5f);
  w.text("tokenizer.ggml.model", "gpt2");
  w.text("tokenizer.ggml.pre", "gpt-2");
  w.texts("tokenizer.ggml.tokens", {"a", "b", "ab", "\u0120", "\u0120ab", "<|endoftext|>"});
  w.numbers<std::int32_t>("tokenizer.ggml.token_type", 5, {1, 1, 1, 1, 1, 3});
  w.texts("tokenizer.ggml.merges", {"a b", "\u0120 ab"});
  w.number("tokenizer.ggml.eos_token_id", 5);
  for (const TinyTensor& t : tiny_tensors()) w.tensor(t.gguf, t.shape, 0, f32_bytes(counting(t.shape)));
  for (const TinyTensor& t : more) w.tensor(t.gguf, t.shape, 0, f32_bytes(counting(t.shape)));
  return w.file();
}

inline const char* const tiny_config = R"({"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8,
  "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16, "vocab_size": 6, "rms_norm_eps": 1e-5,
  "max_position_embeddings": 64, "tie_word_embeddings": true, "eos_token_id": [5]})";

inline const char* const tiny_tokenizer = R"({"added_tokens": [{"id": 5, "content": "<|endoftext|>", "special": true}],
  "normalizer": null, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
    {"type": "Digits", "individual_digits": true}, {"type": "ByteLevel", "add_prefix_space": false}]},
  "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "Ġ": 3, "Ġab": 4}, "merges": ["a b", ["Ġ", "ab"]]}})";

// tensors: those in the file, with Hugging Face's names.
inline std::string tiny_safetensors(const std::vector<TinyTensor>& tensors = tiny_tensors()) {
  std::string header = "{\"__metadata__\": {\"format\": \"pt\"}", data;
  for (const TinyTensor& t : tensors) {
    const std::string bytes = f32_bytes(counting(t.shape));
    std::string shape;
    for (const auto d : t.shape) shape += (shape.empty() ? "" : ", ") + std::to_string(d);
    header += ", \"" + t.hugging_face + "\": {\"dtype\": \"F32\", \"shape\": [" + shape + "], \"data_offsets\": [" +
              std::to_string(data.size()) + ", " + std::to_string(data.size() + bytes.size()) + "]}";
    data += bytes;
  }
  return safetensors_file(header + "}", data);
}

}  // namespace kvlab::test
