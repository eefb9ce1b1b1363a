#include "model/cuda_model.hpp"

#include <algorithm>
#include <kvlab/dtype.hpp>
#include <string>

#include "base/half.hpp"
#include "base/stop.hpp"
#include "model/random_weights.hpp"

namespace kvlab {
namespace {

// Copies weights to the GPU. It waits for the stream before it writes or frees host memory that a copy reads.
class Upload {
 public:
  Upload(const Checkpoint& c, DType dtype, Stream s) : c_(c), dtype_(dtype), s_(s) {}

  // A matrix whose rows are those of several tensors, one after another.
  CudaMatrix matrix(const std::vector<std::string>& names) {
    CudaMatrix out;
    for (const auto& name : names) {
      const auto shape = c_.shape(name);
      out.n += shape.at(0);
      out.k = shape.at(1);
    }
    out.memory = StreamMemory(s_, static_cast<std::size_t>(out.n * out.k) * size_of(dtype_));
    bytes += static_cast<std::int64_t>(out.memory.bytes());
    constexpr std::int64_t block_elements = 8 << 20;
    const std::int64_t rows = std::max<std::int64_t>(1, block_elements / out.k);
    auto* to = out.memory.as<std::uint16_t>();
    for (const auto& name : names) {
      stop::check();
      const std::int64_t all = c_.shape(name).at(0);
      if (const auto random = c_.random_tensor(name)) {
        random_weights(to, dtype_, 0, all * out.k, random->seed, random->scale, s_);
        to += all * out.k;
        continue;
      }
      for (std::int64_t begin = 0; begin < all; begin += rows) {
        stop::check();
        const std::int64_t count = std::min(rows, all - begin), elements = count * out.k;
        wide_.resize(static_cast<std::size_t>(elements));
        narrow_.resize(static_cast<std::size_t>(elements));
        c_.read_weights(name, begin, count, dtype_, wide_.data());
#pragma omp parallel for schedule(static)
        for (std::int64_t i = 0; i < elements; ++i)
          narrow_[static_cast<std::size_t>(i)] = narrow(wide_[static_cast<std::size_t>(i)]);
        copy_memory(to, narrow_.data(), narrow_.size() * sizeof(std::uint16_t), s_);
        synchronize(s_);  // narrow_ is written again
        to += elements;
      }
    }
    synchronize(s_);
    return out;
  }

  StreamMemory vector(const std::vector<std::string>& names) {
    std::vector<float> all;
    for (const auto& name : names) {
      const auto v = c_.read_weights(name);
      all.insert(all.end(), v.begin(), v.end());
    }
    StreamMemory out(s_, all.size() * sizeof(float));
    copy_memory(out.as<>(), all.data(), out.bytes(), s_);
    synchronize(s_);
    return out;
  }

  std::int64_t bytes = 0;

 private:
  std::uint16_t narrow(float x) const { return dtype_ == DType::f16 ? float_to_half(x) : bf16(x).bits; }

  const Checkpoint& c_;
  DType dtype_;
  Stream s_;
  std::vector<float> wide_;
  std::vector<std::uint16_t> narrow_;
};

}  // namespace

std::shared_ptr<const CudaModel> load_cuda_model(const Checkpoint& c, DType dtype) {
  const ModelConfig& m = c.config();
  const OwnedStream stream(Device::cuda);
  Upload up(c, dtype, stream.get());
  auto model = std::make_shared<CudaModel>();
  model->dtype = dtype;
  model->final_norm = up.vector({"model.norm.weight"});
  model->head = up.matrix({m.tied_embeddings ? "model.embed_tokens.weight" : "lm_head.weight"});
  if (!m.tied_embeddings) model->embedding = up.matrix({"model.embed_tokens.weight"});
  for (int i = 0; i < m.layers; ++i) {
    const std::string p = "model.layers." + std::to_string(i) + ".", a = p + "self_attn.";
    CudaLayer l;
    l.input_norm = up.vector({p + "input_layernorm.weight"});
    l.post_norm = up.vector({p + "post_attention_layernorm.weight"});
    l.qkv = up.matrix({a + "q_proj.weight", a + "k_proj.weight", a + "v_proj.weight"});
    if (m.qkv_bias) l.qkv_bias = up.vector({a + "q_proj.bias", a + "k_proj.bias", a + "v_proj.bias"});
    if (m.qk_norm) {
      l.query_norm = up.vector({a + "q_norm.weight"});
      l.key_norm = up.vector({a + "k_norm.weight"});
    }
    l.output = up.matrix({a + "o_proj.weight"});
    if (m.o_bias) l.output_bias = up.vector({a + "o_proj.bias"});
    l.gate_up = up.matrix({p + "mlp.gate_proj.weight", p + "mlp.up_proj.weight"});
    l.down = up.matrix({p + "mlp.down_proj.weight"});
    model->layers.push_back(std::move(l));
  }
  model->weight_bytes = up.bytes;
  return model;
}

}  // namespace kvlab
