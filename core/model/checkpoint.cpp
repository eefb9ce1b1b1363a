#include "model/checkpoint.hpp"

#include <fmt/format.h>

#include <kvlab/error.hpp>
#include <set>

#include "base/finite.hpp"
#include "model/checkpoint_checks.hpp"
#include "model/gguf_checkpoint.hpp"
#include "model/hf_checkpoint.hpp"

namespace kvlab {

std::vector<float> Checkpoint::read(std::string_view name) const {
  const std::vector<std::int64_t> dims = shape(name);
  std::int64_t rows = 1;
  for (std::size_t i = 0; i + 1 < dims.size(); ++i) rows *= dims[i];
  std::vector<float> out(static_cast<std::size_t>(rows * dims.back()));
  read_rows(name, 0, rows, out.data());
  return out;
}

void Checkpoint::read_weights(std::string_view name, std::int64_t row_begin, std::int64_t row_count, DType dtype,
                              float* out) const {
  read_rows(name, row_begin, row_count, out);
  check_weights(out, row_count, shape(name).back(), row_begin, dtype, fmt::format("tensor {}", name));
}

std::vector<float> Checkpoint::read_weights(std::string_view name) const {
  std::vector<float> out = read(name);
  const std::int64_t columns = shape(name).back();
  check_weights(out.data(), static_cast<std::int64_t>(out.size()) / columns, columns, 0, DType::f32,
                fmt::format("tensor {}", name));
  return out;
}

void check_weights(const float* x, std::int64_t rows, std::int64_t columns, std::int64_t first_row, DType dtype,
                   const std::string& where) {
  const float limit = finite_limit(dtype);
  const std::int64_t found = count_nonfinite(x, rows * columns, limit);
  if (found == 0) return;
  std::int64_t at = 0;
  while (count_nonfinite(x + at, 1, limit) == 0) ++at;
  throw NonFinite(
      found,
      Error(Errc::model,
            fmt::format("got {} of {} weights that are NaN or infinite as {}, the first at [{}, {}]: {}; wanted none",
                        found, rows * columns, name_of(dtype), first_row + at / columns, at % columns, x[at]),
            where));
}

void check_tensors(const Checkpoint& checkpoint, const std::string& where) {
  const ModelConfig& c = checkpoint.config();
  using Shape = std::vector<std::int64_t>;
  std::set<std::string> wanted;
  const auto want = [&](const std::string& name, const Shape& shape) {
    wanted.insert(name);
    if (!checkpoint.has(name)) throw Error(Errc::model, "got no such tensor, wanted it", where + ": " + name);
    const auto text = [](const Shape& s) { return fmt::format("[{}]", fmt::join(s, ", ")); };
    if (const Shape got = checkpoint.shape(name); got != shape)
      throw Error(Errc::model, fmt::format("got shape {}, wanted {}", text(got), text(shape)), where + ": " + name);
  };
  const std::int64_t q = std::int64_t{c.heads} * c.head_dim, kv = std::int64_t{c.kv_heads} * c.head_dim;
  want("model.embed_tokens.weight", {c.vocab, c.hidden});
  want("model.norm.weight", {c.hidden});
  if (!c.tied_embeddings) want("lm_head.weight", {c.vocab, c.hidden});
  for (int layer = 0; layer < c.layers; ++layer) {
    const std::string at = fmt::format("model.layers.{}.", layer);
    want(at + "input_layernorm.weight", {c.hidden});
    want(at + "post_attention_layernorm.weight", {c.hidden});
    want(at + "self_attn.q_proj.weight", {q, c.hidden});
    want(at + "self_attn.k_proj.weight", {kv, c.hidden});
    want(at + "self_attn.v_proj.weight", {kv, c.hidden});
    want(at + "self_attn.o_proj.weight", {c.hidden, q});
    want(at + "mlp.gate_proj.weight", {c.ffn, c.hidden});
    want(at + "mlp.up_proj.weight", {c.ffn, c.hidden});
    want(at + "mlp.down_proj.weight", {c.hidden, c.ffn});
    if (c.qkv_bias) {
      want(at + "self_attn.q_proj.bias", {q});
      want(at + "self_attn.k_proj.bias", {kv});
      want(at + "self_attn.v_proj.bias", {kv});
    }
    if (c.o_bias) want(at + "self_attn.o_proj.bias", {c.hidden});
    if (c.qk_norm) {
      want(at + "self_attn.q_norm.weight", {c.head_dim});
      want(at + "self_attn.k_norm.weight", {c.head_dim});
    }
  }
  // A tensor that nobody reads means that the configuration is another model's: only a part of this one would run.
  for (const std::string& name : checkpoint.names())
    if (!wanted.contains(name) && !name.ends_with(".rotary_emb.inv_freq"))  // follows from the configuration
      throw Error(Errc::model,
                  fmt::format("got a tensor that the configuration has no place for, wanted those of {} layers of {}",
                              c.layers, c.family),
                  where + ": " + name);
}

void check_tokenizer(const Tokenizer* tokenizer, const ModelConfig& config, const std::string& where) {
  if (tokenizer != nullptr && tokenizer->vocab_size() > config.vocab)
    throw Error(Errc::model,
                fmt::format("got a tokenizer of {} tokens for {} embeddings, wanted no more tokens than embeddings",
                            tokenizer->vocab_size(), config.vocab),
                where);
}

void check_rows(std::string_view tensor, std::int64_t rows, std::int64_t row_begin, std::int64_t row_count,
                const std::string& where) {
  if (row_begin < 0 || row_count < 0 || row_begin > rows || row_count > rows - row_begin)
    throw Error(Errc::model, fmt::format("got rows {} + {}, wanted rows inside 0 to {}", row_begin, row_count, rows),
                fmt::format("{}: {}", where, tensor));
}

void unknown_tensor(std::string_view name, const std::string& where) {
  throw Error(Errc::model, fmt::format("got a request for tensor '{}', wanted one of this file", name), where);
}

std::unique_ptr<Checkpoint> open_checkpoint(const std::filesystem::path& path) {
  if (!std::filesystem::exists(path))
    throw Error(Errc::model, "got no such file or folder, wanted a model", path.string());
  if (std::filesystem::is_directory(path)) return open_hf_folder(path);
  return open_gguf(path);
}

}  // namespace kvlab
