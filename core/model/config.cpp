#include "model/config.hpp"

#include <fmt/format.h>

#include <cmath>
#include <kvlab/error.hpp>

namespace kvlab {
namespace {

constexpr int max_size = 1 << 24;  // of any one dimension: keeps products of two far from overflow

}  // namespace

void validate(const ModelConfig& c, const std::string& where) {
  const auto refuse = [&](const std::string& got, const std::string& wanted) {
    throw Error(Errc::model, "got " + got + ", wanted " + wanted, where);
  };
  if (c.family != "llama" && c.family != "mistral" && c.family != "qwen2" && c.family != "qwen3")
    refuse("model family '" + c.family + "'", "llama, mistral, qwen2 or qwen3");
  const std::pair<const char*, int> sizes[] = {
      {"layers", c.layers}, {"hidden", c.hidden},     {"heads", c.heads}, {"kv_heads", c.kv_heads},
      {"ffn", c.ffn},       {"head_dim", c.head_dim}, {"vocab", c.vocab}, {"context", c.context}};
  for (const auto& [name, value] : sizes)
    if (value < 1 || value > max_size) refuse(fmt::format("{} {}", name, value), fmt::format("1 to {}", max_size));
  if (c.layers > 4096) refuse(fmt::format("layers {}", c.layers), "at most 4096");
  if (c.heads % c.kv_heads != 0)
    refuse(fmt::format("heads {} with kv_heads {}", c.heads, c.kv_heads), "heads divisible by kv_heads");
  if (c.head_dim % 2 != 0) refuse(fmt::format("head_dim {}", c.head_dim), "an even number (rotary pairs)");
  if (std::int64_t{c.heads} * c.head_dim > max_size)
    refuse(fmt::format("{} heads of {}", c.heads, c.head_dim), fmt::format("a width of at most {}", max_size));
  if (!std::isfinite(c.rope_theta) || c.rope_theta <= 0)
    refuse(fmt::format("rope_theta {}", c.rope_theta), "a positive number");
  if (!std::isfinite(c.rms_eps) || c.rms_eps <= 0 || c.rms_eps > 0.1f)
    refuse(fmt::format("rms_eps {}", c.rms_eps), "a small positive number");
  if (c.sliding_window < 0) refuse(fmt::format("sliding_window {}", c.sliding_window), "0 (none) or more");
  const RopeScaling& r = c.rope_scaling;
  const auto positive = [](float v) { return std::isfinite(v) && v > 0; };
  if ((r.kind == RopeScaling::Kind::linear || r.kind == RopeScaling::Kind::llama3) && !positive(r.factor))
    refuse(fmt::format("rope scaling factor {}", r.factor), "a positive number");
  if (r.kind == RopeScaling::Kind::llama3 && (!positive(r.low_freq_factor) || !positive(r.high_freq_factor) ||
                                              r.low_freq_factor >= r.high_freq_factor || r.original_context < 1))
    refuse(fmt::format("rope scaling low {}, high {}, original context {}", r.low_freq_factor, r.high_freq_factor,
                       r.original_context),
           "0 < low < high and a positive context");
  if (r.kind == RopeScaling::Kind::factors) {
    if (static_cast<int>(r.factors.size()) != c.head_dim / 2)
      refuse(fmt::format("{} rope factors", r.factors.size()), fmt::format("head_dim / 2 = {}", c.head_dim / 2));
    for (const float f : r.factors)
      if (!positive(f)) refuse(fmt::format("rope factor {}", f), "positive numbers");
  }
  if (c.bos_id < -1 || c.bos_id >= c.vocab)
    refuse(fmt::format("bos_id {}", c.bos_id), fmt::format("-1 to {}", c.vocab - 1));
  for (const int id : c.eos_ids)
    if (id < 0 || id >= c.vocab) refuse(fmt::format("eos id {}", id), fmt::format("0 to {}", c.vocab - 1));
}

std::vector<float> inverse_frequencies(const ModelConfig& c) {
  const RopeScaling& r = c.rope_scaling;
  std::vector<float> out(static_cast<std::size_t>(c.head_dim / 2));
  for (std::size_t i = 0; i < out.size(); ++i) {
    const double pi = 3.14159265358979323846;
    double f = std::pow(double{c.rope_theta}, -2.0 * static_cast<double>(i) / c.head_dim);
    switch (r.kind) {
      case RopeScaling::Kind::none: break;
      case RopeScaling::Kind::linear: f /= r.factor; break;
      case RopeScaling::Kind::factors: f /= r.factors[i]; break;
      case RopeScaling::Kind::llama3: {
        // A pair that makes few turns within the original context is stretched; one that makes many is kept.
        const double turns = r.original_context * f / (2 * pi);
        const double keep = (turns - r.low_freq_factor) / (double{r.high_freq_factor} - r.low_freq_factor);
        const double share = std::fmin(1.0, std::fmax(0.0, keep));
        f = share * f + (1 - share) * f / r.factor;
        break;
      }
    }
    out[i] = static_cast<float>(f);
  }
  return out;
}

}  // namespace kvlab
