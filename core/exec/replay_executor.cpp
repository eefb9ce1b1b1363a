#include "exec/replay_executor.hpp"

#include <kvlab/error.hpp>

#include <algorithm>

#include "base/per_thread.hpp"
#include "ops/linear/norm.hpp"
#include "ops/page/paged.hpp"

namespace kvlab {

ReplayExecutor::ReplayExecutor(std::shared_ptr<const Model> model, CpuStore& store, const RecordedRows& rows)
    : CpuExecutor(std::move(model), store), recorded_(rows) {}

void ReplayExecutor::embed(std::int64_t) {}
void ReplayExecutor::finish_layer(int, std::int64_t) {}
void ReplayExecutor::head(std::int64_t, const StepResult&) {}
void ReplayExecutor::prompt_logits(std::int64_t, const View<float, 2>&) { note_rows(); }
void ReplayExecutor::read(std::int64_t, const StepResult&) { note_rows(); }

void ReplayExecutor::project(int layer, std::int64_t rows) {
  recorded_.read(layer, position_[0], rows, qkv_.q.data(), qkv_.k.data(), qkv_.v.data());
  if (!by_rank()) return;
  // Recorded rows are rotated by text position. Turning them back gives the rows before RoPE, but for rounding.
  const ModelConfig& c = model_->config;
  const std::int64_t half = c.head_dim / 2;
  PerThread<float> angles(static_cast<std::size_t>(2 * half));
#pragma omp parallel for schedule(static) if (rows > 16)
  for (std::int64_t r = 0; r < rows; ++r) {
    const auto angle = angles.own();
    ops::rope_angles(model_->rope(), -static_cast<double>(position_[static_cast<std::size_t>(r)]), angle.data(),
                     angle.data() + half);
    for (int h = 0; h < c.heads; ++h)
      ops::rotate_with(qkv_.q.data() + (r * c.heads + h) * c.head_dim, angle.data(), angle.data() + half, c.head_dim);
    for (int h = 0; h < c.kv_heads; ++h)
      ops::rotate_with(qkv_.k.data() + (r * c.kv_heads + h) * c.head_dim, angle.data(), angle.data() + half,
                       c.head_dim);
  }
  qkv_.raw_q = qkv_.q;
  ops::round_to(qkv_.k.data(), rows * key_width(), static_cast<int>(size_of(store_.shape().dtype)));
  qkv_.raw_k = qkv_.k;
}

// In the original regime the recorded rows are rotated already.
void ReplayExecutor::rotate_token(int layer, int slot, std::int64_t row, std::int64_t ahead) {
  if (by_rank()) CpuExecutor::rotate_token(layer, slot, row, ahead);
}

Fit ReplayExecutor::attend_prompt(PromptLayer& info, std::int64_t n, int first, bool mass) {
  const ModelConfig& c = model_->config;
  if (first > 0 || !info.last)
    throw Error(Errc::config, "got a part of a prompt, wanted the whole prompt: a recording has its mass as one sum");
  info.past = 0;
  for (std::int64_t t = 0; t < n; ++t) rotate_token(info.layer, info.slot, t, t);
  if (store_.options().rope != RopeRegime::cache_relative)
    ops::round_to(qkv_.k.data(), n * key_width(), static_cast<int>(size_of(store_.shape().dtype)));
  static_cast<LayerRows&>(info) = rows_of(info.layer, n);
  if (mass) {
    const std::span<const float> sums = recorded_.prompt_mass(info.layer);
    if (static_cast<std::int64_t>(sums.size()) != c.heads * n)
      throw Error(Errc::internal, "got the mass of another prompt, wanted that of " + std::to_string(n) + " tokens");
    info.mass = View<const float, 2>::dense(sums.data(), {c.heads, n});
  }
  return store_.append(info.layer, info.slot, cached_keys(), qkv_.v.data(), static_cast<int>(n), first);
}

}  // namespace kvlab
