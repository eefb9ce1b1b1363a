#include "replay/replayed_rows.hpp"

#include <fmt/format.h>
#include <kvlab/error.hpp>

#include <algorithm>

namespace kvlab {

void ReplayedRows::use(std::size_t i) {
  if (i == used_) return;
  layers_ = recording_->layers(cases_[i]);
  used_ = i;
}

void ReplayedRows::read(int layer, std::int64_t first, std::int64_t n, float* queries, float* keys,
                        float* values) const {
  const ModelConfig& m = recording_->head().model->config;
  const RecordedCase& c = of(used_);
  if (first + n > c.tokens())
    throw Error(Errc::internal, fmt::format("got text positions up to {}, wanted at most {}, as many as were recorded",
                                            first + n, c.tokens()));
  const std::int64_t query = std::int64_t{m.heads} * m.head_dim, key = std::int64_t{m.kv_heads} * m.head_dim;
  const auto prompt = static_cast<std::int64_t>(c.prompt.size());
  const std::int64_t of_prompt = std::clamp<std::int64_t>(prompt - first, 0, n);
  if (of_prompt > 0)
    std::copy_n(layers_->prompt_queries.data() + (layer * prompt + first) * query, of_prompt * query, queries);
  if (of_prompt < n)
    std::copy_n(layers_->step_queries.data() + (layer * c.steps() + first + of_prompt - prompt) * query,
                (n - of_prompt) * query, queries + of_prompt * query);
  const std::int64_t entry = (layer * c.tokens() + first) * key;
  std::copy_n(layers_->keys.data() + entry, n * key, keys);
  std::copy_n(layers_->values.data() + entry, n * key, values);
}

RecordedRows::Prompt ReplayedRows::prompt(int layer) const {
  const ModelConfig& m = recording_->head().model->config;
  const RecordedCase& c = of(used_);
  const auto tokens = static_cast<std::int64_t>(c.prompt.size());
  const std::int64_t entry = layer * c.tokens() * m.kv_heads * m.head_dim;
  const RecordedLayers& l = *layers_;
  const std::int64_t of_prompt = layer * tokens * m.kv_heads * m.head_dim;
  const auto bits = [&](const std::vector<std::uint16_t>& of) { return of.empty() ? nullptr : of.data() + of_prompt; };
  return {l.prompt_queries.data() + layer * tokens * m.heads * m.head_dim,
          l.keys.data() + entry,
          l.values.data() + entry,
          bits(l.key_bits),
          bits(l.value_bits),
          tokens};
}

std::span<const float> ReplayedRows::prompt_mass(int layer) const {
  const auto of_layer = static_cast<std::size_t>(recording_->head().model->config.heads) * of(used_).prompt.size();
  return std::span(layers_->prompt_mass).subspan(static_cast<std::size_t>(layer) * of_layer, of_layer);
}

}  // namespace kvlab
