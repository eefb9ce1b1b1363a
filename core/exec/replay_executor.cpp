#include "exec/replay_executor.hpp"

#include <kvlab/error.hpp>

#include <algorithm>
#include <functional>

#include "ops/linear/norm.hpp"
#include "ops/page/paged.hpp"

namespace kvlab {

ReplayExecutor::ReplayExecutor(std::shared_ptr<const Model> model, CpuStore& store, const RecordedRows& rows)
    : CpuExecutor(std::move(model), store), recorded_(rows) {
  if (!by_rank()) return;
  const auto half = static_cast<std::size_t>(model_->config.head_dim / 2);
  for (int position = 0; position < store.shape().max_tokens; ++position) {
    const std::size_t at = turns_.size();
    turns_.resize(at + 3 * half);
    float* const sine = turns_.data() + at + half;
    ops::rope_angles(model_->rope(), position, turns_.data() + at, sine);
    std::transform(sine, sine + half, sine + half, std::negate<>());
  }
}

ReplayExecutor::Angle ReplayExecutor::angle(std::int64_t position, bool back) const {
  const std::int64_t half = model_->config.head_dim / 2;
  const float* const at = turns_.data() + position * 3 * half;
  return {at, at + (back ? 2 : 1) * half};
}

// A prompt's rows stay in the recording unless they are turned, so room for one row serves.
void ReplayExecutor::begin(std::span<const int> tokens, const std::vector<std::int32_t>& position, Phase phase) {
  in_place_ = phase != Phase::decode && !by_rank();
  if (!in_place_) return CpuExecutor::begin(tokens, position, phase);
  CpuExecutor::begin(tokens.first(1), {position.front()}, phase);
  position_ = position;
}

void ReplayExecutor::embed(std::int64_t) {}
void ReplayExecutor::finish_layer(int, std::int64_t) {}
void ReplayExecutor::head(std::int64_t, const StepResult&) {}
void ReplayExecutor::prompt_logits(std::int64_t, const View<float, 2>&) { note_rows(); }
void ReplayExecutor::read(std::int64_t, const StepResult&) { note_rows(); }

void ReplayExecutor::project(int layer, std::int64_t rows) {
  if (in_place_) return;
  recorded_.read(layer, position_[0], rows, qkv_.q.data(), qkv_.k.data(), qkv_.v.data());
  if (!by_rank()) return;
  // Recorded rows are rotated by text position. Turning them back gives the rows before RoPE, but for rounding.
  const ModelConfig& c = model_->config;
#pragma omp parallel for schedule(static) if (rows > 16)
  for (std::int64_t r = 0; r < rows; ++r) {
    const Angle turn = angle(position_[static_cast<std::size_t>(r)], true);
    for (int h = 0; h < c.heads; ++h)
      ops::rotate_with(qkv_.q.data() + (r * c.heads + h) * c.head_dim, turn.cosine, turn.sine, c.head_dim);
    for (int h = 0; h < c.kv_heads; ++h)
      ops::rotate_with(qkv_.k.data() + (r * c.kv_heads + h) * c.head_dim, turn.cosine, turn.sine, c.head_dim);
  }
  qkv_.raw_q = qkv_.q;
  ops::round_to(qkv_.k.data(), rows * key_width(), static_cast<int>(size_of(store_.shape().dtype)));
  qkv_.raw_k = qkv_.k;
}

// In the original regime the recorded rows are rotated already.
void ReplayExecutor::rotate_token(int layer, int slot, std::int64_t row, std::int64_t ahead) {
  if (!by_rank()) return;
  const ModelConfig& c = model_->config;
  for (int head = 0; head < c.kv_heads; ++head) {
    const Angle turn = angle(store_.length(layer, slot, head) + ahead, false);
    ops::rotate_with(qkv_.k.data() + (row * c.kv_heads + head) * c.head_dim, turn.cosine, turn.sine, c.head_dim);
    for (int g = 0; g < c.group(); ++g)
      ops::rotate_with(qkv_.q.data() + (row * c.heads + head * c.group() + g) * c.head_dim, turn.cosine, turn.sine,
                       c.head_dim);
  }
}

Fit ReplayExecutor::attend_prompt(PromptLayer& info, std::int64_t n, int first, bool mass) {
  const ModelConfig& c = model_->config;
  if (first > 0 || !info.last)
    throw Error(Errc::config, "got a part of a prompt, wanted the whole prompt: a recording has its mass as one sum");
  info.past = 0;
  const float *keys, *values;
  CpuStore::Bits bits;
  if (in_place_) {
    const RecordedRows::Prompt rows = recorded_.prompt(info.layer);
    if (rows.tokens != n)
      throw Error(Errc::internal, "got a prompt of " + std::to_string(n) + " tokens, wanted the recorded one of " +
                                      std::to_string(rows.tokens));
    keys = rows.keys, values = rows.values;
    bits = {rows.key_bits, rows.value_bits};
    info.queries = View<const float, 3>::dense(rows.queries, {n, c.heads, c.head_dim});
    info.keys = View<const float, 3>::dense(keys, {n, c.kv_heads, c.head_dim});
    info.values = View<const float, 3>::dense(values, {n, c.kv_heads, c.head_dim});
  } else {
#pragma omp parallel for schedule(static) if (n > 16)
    for (std::int64_t t = 0; t < n; ++t) rotate_token(info.layer, info.slot, t, t);
    if (store_.options().rope != RopeRegime::cache_relative)
      ops::round_to(qkv_.k.data(), n * key_width(), static_cast<int>(size_of(store_.shape().dtype)));
    static_cast<LayerRows&>(info) = rows_of(info.layer, n);
    keys = cached_keys(), values = qkv_.v.data();
  }
  if (mass) {
    const std::span<const float> sums = recorded_.prompt_mass(info.layer);
    if (static_cast<std::int64_t>(sums.size()) != c.heads * n)
      throw Error(Errc::internal, "got the mass of another prompt, wanted that of " + std::to_string(n) + " tokens");
    info.mass = View<const float, 2>::dense(sums.data(), {c.heads, n});
  }
  return store_.append(info.layer, info.slot, keys, values, static_cast<int>(n), first, bits);
}

}  // namespace kvlab
