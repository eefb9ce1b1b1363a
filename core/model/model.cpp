#include "model/model.hpp"

#include <fmt/format.h>
#include <unistd.h>
#include <kvlab/error.hpp>

#include <algorithm>
#include <exception>
#include <mutex>

#include "base/finite.hpp"
#include "base/stop.hpp"
#include "base/stream_memory.hpp"
#include "model/cuda_model.hpp"

namespace kvlab {
namespace {

// A matrix whose rows are those of several tensors, one after another.
ops::Linear stacked(const Checkpoint& c, const std::vector<std::string>& names, DType dtype) {
  std::vector<std::int64_t> begin{0};
  std::int64_t columns = 0;
  for (const auto& name : names) {
    const auto shape = c.shape(name);
    columns = shape.at(1);
    begin.push_back(begin.back() + shape[0]);
  }
  return ops::Linear::pack(begin.back(), columns, dtype, [&](std::int64_t first, std::int64_t count, float* out) {
    for (std::size_t i = 0; i < names.size(); ++i) {
      const std::int64_t from = std::max(first, begin[i]), to = std::min(first + count, begin[i + 1]);
      if (from < to) c.read_weights(names[i], from - begin[i], to - from, dtype, out + (from - first) * columns);
    }
  });
}

std::vector<float> stacked_vector(const Checkpoint& c, const std::vector<std::string>& names) {
  std::vector<float> out;
  for (const auto& name : names) {
    const auto v = c.read_weights(name);
    out.insert(out.end(), v.begin(), v.end());
  }
  return out;
}

ModelLayer load_layer(const Checkpoint& c, int index, DType dtype) {
  const ModelConfig& m = c.config();
  const std::string p = "model.layers." + std::to_string(index) + ".", a = p + "self_attn.";
  ModelLayer l;
  l.input_norm = c.read_weights(p + "input_layernorm.weight");
  l.post_norm = c.read_weights(p + "post_attention_layernorm.weight");
  l.qkv = stacked(c, {a + "q_proj.weight", a + "k_proj.weight", a + "v_proj.weight"}, dtype);
  if (m.qkv_bias) l.qkv_bias = stacked_vector(c, {a + "q_proj.bias", a + "k_proj.bias", a + "v_proj.bias"});
  if (m.qk_norm) {
    l.query_norm = c.read_weights(a + "q_norm.weight");
    l.key_norm = c.read_weights(a + "k_norm.weight");
  }
  l.output = stacked(c, {a + "o_proj.weight"}, dtype);
  if (m.o_bias) l.output_bias = c.read_weights(a + "o_proj.bias");
  l.gate_up = stacked(c, {p + "mlp.gate_proj.weight", p + "mlp.up_proj.weight"}, dtype);
  l.down = stacked(c, {p + "mlp.down_proj.weight"}, dtype);
  return l;
}

// Refuses weights larger than the machine's memory, before the operating system kills the process.
void check_room(const Checkpoint& c, DType dtype) {
  double bytes = 0;
  for (const std::string& name : c.names()) {
    double elements = 1;
    for (const std::int64_t d : c.shape(name)) elements *= static_cast<double>(d);
    bytes += elements * static_cast<double>(size_of(dtype));
  }
  const double memory = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  if (memory > 0 && bytes > memory)
    throw NoRoom(
        fmt::format("got {:.1f} GB of weights, wanted at most this machine's {:.1f} GB", bytes / 1e9, memory / 1e9));
}

}  // namespace

std::shared_ptr<Model> model_outline(const Checkpoint& c, DType dtype, const std::string& name, Device device) {
  const bool cuda = device == Device::cuda;
  if (dtype != DType::bf16 && dtype != (cuda ? DType::f16 : DType::f32))
    throw Error(Errc::unsupported,
                std::string("got dtype ") + name_of(dtype) + ", wanted " +
                    (cuda ? "bf16 or f16 on CUDA" : "f32 or bf16 on the CPU"),
                name);
  auto m = std::make_shared<Model>();
  m->config = c.config();
  m->dtype = dtype;
  m->name = name;
  m->fingerprint = c.fingerprint();
  m->synthetic = c.random_tensor("model.embed_tokens.weight").has_value();
  m->tokenizer = c.tokenizer();
  m->inv_freq = inverse_frequencies(m->config);
  return m;
}

namespace {

std::shared_ptr<const Model> load(const Checkpoint& c, DType dtype, const std::string& name, Device device) {
  const auto m = model_outline(c, dtype, name, device);
  if (device == Device::cuda) {
    m->cuda = load_cuda_model(c, dtype);
    m->weight_bytes = m->cuda->weight_bytes;
    return m;
  }
  check_room(c, dtype);
  m->final_norm = c.read_weights("model.norm.weight");
  m->layers.resize(static_cast<std::size_t>(m->config.layers));

  // Layers load side by side. No exception may leave the parallel region, so the first one is thrown again after it.
  std::exception_ptr failure;
  std::mutex guard;
#pragma omp parallel for schedule(dynamic)
  for (int i = -1; i < m->config.layers; ++i) try {
      stop::check();
      if (i >= 0) {
        m->layers[static_cast<std::size_t>(i)] = load_layer(c, i, dtype);
      } else {
        const bool tied = m->config.tied_embeddings;
        m->head = stacked(c, {tied ? "model.embed_tokens.weight" : "lm_head.weight"}, dtype);
        if (!tied) m->embedding = stacked(c, {"model.embed_tokens.weight"}, dtype);
      }
    } catch (...) {
      const std::lock_guard lock(guard);
      if (!failure) failure = std::current_exception();
    }
  if (failure) std::rethrow_exception(failure);

  m->weight_bytes = m->head.bytes() + (m->config.tied_embeddings ? 0 : m->embedding.bytes());
  for (const auto& l : m->layers)
    m->weight_bytes += l.qkv.bytes() + l.output.bytes() + l.gate_up.bytes() + l.down.bytes();
  return m;
}

}  // namespace

std::shared_ptr<const Model> load_model(const Checkpoint& c, DType dtype, const std::string& name, Device device) {
  try {
    return load(c, dtype, name, device);
  } catch (const NonFinite& e) {
    throw NonFinite(e.count(), Error(e.code(), e.message(), name + ": " + e.where()));
  }
}

}  // namespace kvlab
