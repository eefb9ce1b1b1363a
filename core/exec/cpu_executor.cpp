#include "exec/cpu_executor.hpp"

#include <kvlab/error.hpp>

#include <algorithm>
#include <cmath>

#include "base/part_timer.hpp"
#include "ops/attend/attend.hpp"
#include "ops/linear/norm.hpp"
#include "ops/page/paged.hpp"

namespace kvlab {
namespace {

constexpr std::int64_t row_block = 512;  // rows of a prompt that pass the MLP together: bounds activation memory

View<float, 3> heads_view(std::vector<float>& data, std::int64_t rows, std::int64_t heads, std::int64_t dim) {
  return View<float, 3>::dense(data.data(), {rows, heads, dim});
}

}  // namespace

CpuExecutor::CpuExecutor(std::shared_ptr<const Model> model, CpuStore& store)
    : Executor(std::move(model)), store_(store) {}

void CpuExecutor::Qkv::resize(std::size_t rows, const ModelConfig& c, bool raw) {
  const std::size_t query = rows * static_cast<std::size_t>(c.heads * c.head_dim);
  const std::size_t key = rows * static_cast<std::size_t>(c.kv_heads * c.head_dim);
  q.resize(query);
  k.resize(key);
  v.resize(key);
  if (raw) raw_q.resize(query), raw_k.resize(key);
}

// qkv of `rows` rows of x into rows [at, at + rows) of qkv_, with biases and QK norm, before RoPE.
void CpuExecutor::project(const ModelLayer& l, const float* x, std::int64_t rows, std::int64_t at) {
  const ModelConfig& c = model_->config;
  const std::int64_t qn = std::int64_t{c.heads} * c.head_dim, kn = std::int64_t{c.kv_heads} * c.head_dim,
                     n = qn + 2 * kn;
  hidden_.resize(static_cast<std::size_t>(rows * c.hidden));
  wide_.resize(static_cast<std::size_t>(rows * n));
  ops::rms_norm(x, l.input_norm.data(), c.rms_eps, rows, c.hidden, hidden_.data());
  {
    const PartTimer timer(Part::gemm);
    l.qkv.apply(hidden_.data(), c.hidden, wide_.data(), n, rows);
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    float* y = wide_.data() + r * n;
    if (!l.qkv_bias.empty()) ops::add(l.qkv_bias.data(), n, y);
    float* q = qkv_.q.data() + (at + r) * qn;
    float* k = qkv_.k.data() + (at + r) * kn;
    if (l.query_norm.empty()) {
      std::copy(y, y + qn, q);
      std::copy(y + qn, y + qn + kn, k);
    } else {
      ops::rms_norm(y, l.query_norm.data(), c.rms_eps, c.heads, c.head_dim, q);
      ops::rms_norm(y + qn, l.key_norm.data(), c.rms_eps, c.kv_heads, c.head_dim, k);
    }
    std::copy(y + qn + kn, y + n, qkv_.v.data() + (at + r) * kn);
  }
}

// x += output projection of `attention`, then x += MLP(x).
void CpuExecutor::finish_layer(const ModelLayer& l, const float* attention, float* x, std::int64_t rows) {
  const ModelConfig& c = model_->config;
  const std::int64_t qn = std::int64_t{c.heads} * c.head_dim;
  for (std::int64_t begin = 0; begin < rows; begin += row_block) {
    const std::int64_t count = std::min(row_block, rows - begin);
    float* xb = x + begin * c.hidden;
    hidden_.resize(static_cast<std::size_t>(count * c.hidden));
    wide_.resize(static_cast<std::size_t>(count * 2 * c.ffn));
    {
      const PartTimer timer(Part::gemm);
      l.output.apply(attention + begin * qn, qn, hidden_.data(), c.hidden, count);
    }
    if (!l.output_bias.empty())
      for (std::int64_t r = 0; r < count; ++r) ops::add(l.output_bias.data(), c.hidden, hidden_.data() + r * c.hidden);
    ops::add(hidden_.data(), count * c.hidden, xb);
    ops::rms_norm(xb, l.post_norm.data(), c.rms_eps, count, c.hidden, hidden_.data());
    {
      const PartTimer timer(Part::gemm);
      l.gate_up.apply(hidden_.data(), c.hidden, wide_.data(), 2 * c.ffn, count);
    }
#pragma omp parallel for schedule(static) if (count > 8)
    for (std::int64_t r = 0; r < count; ++r) {
      float* row = wide_.data() + r * 2 * c.ffn;
      ops::silu_mul(row, row + c.ffn, c.ffn, row);
    }
    {
      const PartTimer timer(Part::gemm);
      l.down.apply(wide_.data(), 2 * c.ffn, hidden_.data(), c.hidden, count);
    }
    ops::add(hidden_.data(), count * c.hidden, xb);
  }
}

void CpuExecutor::add_angle(int position) {
  const std::size_t half = static_cast<std::size_t>(model_->config.head_dim / 2), at = angles_.size();
  angles_.resize(at + 2 * half);
  ops::rope_angles(model_->rope(), position, angles_.data() + at, angles_.data() + at + half);
}

// RoPE of query and key of one row of qkv_. Original regime: by the row's text position. Otherwise by the rank that the
// token takes in its head's cache, `ahead` tokens after the last one there.
void CpuExecutor::rotate_token(int layer, int slot, std::int64_t row, std::int64_t ahead) {
  const ModelConfig& c = model_->config;
  const std::size_t half = static_cast<std::size_t>(c.head_dim / 2);
  std::vector<float> own;
  const float* angle = nullptr;
  int length_of_angle = -1;
  if (store_.options().rope == RopeRegime::original)
    angle = angles_.data() + static_cast<std::size_t>(row) * 2 * half;
  else
    own.resize(2 * half);
  for (int head = 0; head < c.kv_heads; ++head) {
    if (!own.empty()) {
      const int length = store_.length(layer, slot, head);
      if (length != length_of_angle)
        ops::rope_angles(model_->rope(), static_cast<double>(length + ahead), own.data(), own.data() + half);
      length_of_angle = length;
      angle = own.data();
    }
    ops::rotate_with(qkv_.k.data() + (row * c.kv_heads + head) * c.head_dim, angle, angle + half, c.head_dim);
    for (int g = 0; g < c.group(); ++g)
      ops::rotate_with(qkv_.q.data() + (row * c.heads + head * c.group() + g) * c.head_dim, angle, angle + half,
                       c.head_dim);
  }
}

void CpuExecutor::logits_of(const float* x, std::int64_t rows, View<float, 2> out) {
  const ModelConfig& c = model_->config;
  hidden_.resize(static_cast<std::size_t>(rows * c.hidden));
  ops::rms_norm(x, model_->final_norm.data(), c.rms_eps, rows, c.hidden, hidden_.data());
  const PartTimer timer(Part::gemm);
  model_->head.apply(hidden_.data(), c.hidden, out.data, out.stride[0], rows);
}

void CpuExecutor::look_at(std::int64_t row, const float* x, std::int64_t count, float limit) {
  if (count_nonfinite(x, count, limit) > 0) nonfinite_[static_cast<std::size_t>(row)] = 1;
}

void CpuExecutor::look_at_entries(std::int64_t row, std::int64_t first, std::int64_t tokens) {
  const ModelConfig& c = model_->config;
  const std::int64_t qn = std::int64_t{c.heads} * c.head_dim, kn = std::int64_t{c.kv_heads} * c.head_dim;
  const float limit = finite_limit(store_.shape().dtype);
  look_at(row, qkv_.q.data() + first * qn, tokens * qn);
  look_at(row, qkv_.k.data() + first * kn, tokens * kn, limit);
  look_at(row, qkv_.v.data() + first * kn, tokens * kn, limit);
}

void CpuExecutor::note_rows() {
  nonfinite_rows_.clear();
  for (std::size_t r = 0; r < nonfinite_.size(); ++r)
    if (nonfinite_[r]) nonfinite_rows_.push_back(static_cast<std::int32_t>(r));
}

Fit CpuExecutor::prefill(int slot, std::span<const int> tokens, bool last, LayerHooks& hooks, View<float, 2> logits) {
  const ModelConfig& c = model_->config;
  const Shape& s = store_.shape();
  const std::int64_t n = static_cast<std::int64_t>(tokens.size());
  const int first = store_.position(slot);
  const RopeRegime regime = store_.options().rope;
  const std::vector<std::int32_t> slots{slot};

  nonfinite_.assign(1, 0);
  x_.resize(static_cast<std::size_t>(n * c.hidden));
  for (std::int64_t t = 0; t < n; ++t) model_->embed(tokens[static_cast<std::size_t>(t)], x_.data() + t * c.hidden);
  const bool raw = regime != RopeRegime::original;
  qkv_.resize(static_cast<std::size_t>(n), c, raw);
  attention_.resize(static_cast<std::size_t>(n * c.heads * c.head_dim));
  angles_.clear();
  if (!raw)
    for (std::int64_t t = 0; t < n; ++t) add_angle(first + static_cast<int>(t));

  for (int layer = 0; layer < c.layers; ++layer) {
    const ModelLayer& l = model_->layers[static_cast<std::size_t>(layer)];
    for (std::int64_t begin = 0; begin < n; begin += row_block)
      project(l, x_.data() + begin * c.hidden, std::min(row_block, n - begin), begin);
    if (raw) qkv_.raw_q = qkv_.q;
    const int bytes = static_cast<int>(size_of(s.dtype));
    const std::int64_t kn = std::int64_t{c.kv_heads} * c.head_dim;
    if (raw) {
      // Cached before RoPE, so the rounding comes first.
      ops::round_to(qkv_.k.data(), n * kn, bytes);
      qkv_.raw_k = qkv_.k;
    }
    if (first > 0 && hooks.before_prompt(layer, slot) != Fit::ok) return Fit::out_of_memory;
    int past = 0;
    for (int head = 0; head < c.kv_heads; ++head) past = std::max(past, store_.length(layer, slot, head));
#pragma omp parallel for schedule(static) if (n > 16)
    for (std::int64_t t = 0; t < n; ++t) rotate_token(layer, slot, t, t);
    if (regime != RopeRegime::cache_relative) ops::round_to(qkv_.k.data(), n * kn, bytes);
    ops::round_to(qkv_.v.data(), n * kn, bytes);
    look_at_entries(0, 0, n);

    const auto queries = heads_view(qkv_.q, n, c.heads, c.head_dim),
               keys = heads_view(qkv_.k, n, c.kv_heads, c.head_dim),
               values = heads_view(qkv_.v, n, c.kv_heads, c.head_dim),
               output = heads_view(attention_, n, c.heads, c.head_dim);
    PromptLayer info;
    {
      const PartTimer timer(Part::attend);
      ops::PrefillArgs a;
      a.kv = store_.view(layer, slots);
      a.queries = queries;
      a.keys = keys;
      a.values = values;
      a.softmax_scale = 1.f / std::sqrt(static_cast<float>(c.head_dim));
      a.window = c.sliding_window;
      a.first = first;
      a.out = output;
      a.round_to_bf16 = s.dtype == DType::bf16;
      if (hooks.wants_prompt_mass()) {
        mass_.resize(static_cast<std::size_t>(c.heads) * static_cast<std::size_t>(past + n));
        a.mass = View<float, 2>::dense(mass_.data(), {c.heads, past + n});
        info.mass = a.mass;
      }
      ops::prefill_attention(a, store_.workspace(), Stream::cpu());
      store_.workspace().reset();
      if (a.mass) look_at(0, mass_.data(), static_cast<std::int64_t>(mass_.size()));
    }
    {
      const PartTimer timer(Part::append);
      const float* k = regime == RopeRegime::cache_relative ? qkv_.raw_k.data() : qkv_.k.data();
      if (store_.append(layer, slot, k, qkv_.v.data(), static_cast<int>(n), first) != Fit::ok)
        return Fit::out_of_memory;
    }
    info.layer = layer;
    info.slot = slot;
    info.past = past;
    info.last = last;
    info.queries = queries;
    info.keys = keys;
    info.values = values;
    info.output = output;
    if (raw) {
      info.raw_queries = heads_view(qkv_.raw_q, n, c.heads, c.head_dim);
      info.raw_keys = heads_view(qkv_.raw_k, n, c.kv_heads, c.head_dim);
    }
    if (hooks.prompt(info) != Fit::ok) return Fit::out_of_memory;
    finish_layer(l, attention_.data(), x_.data(), n);
  }
  if (store_.advance(slot, static_cast<int>(n), false).fit != Fit::ok) return Fit::out_of_memory;
  const std::int64_t wanted = std::min<std::int64_t>(logits ? logits.extent[0] : 0, n);
  if (wanted > 0) logits_of(x_.data() + (n - wanted) * c.hidden, wanted, logits);
  for (std::int64_t r = 0; r < wanted; ++r) look_at(0, logits.data + r * logits.stride[0], c.vocab);
  note_rows();
  return Fit::ok;
}

Fit CpuExecutor::decode(const std::vector<std::int32_t>& slots, std::span<const int> tokens, LayerHooks& hooks,
                        const StepResult& out) {
  const ModelConfig& c = model_->config;
  const Shape& s = store_.shape();
  const std::int64_t n = static_cast<std::int64_t>(slots.size());
  const RopeRegime regime = store_.options().rope;
  const bool raw = regime != RopeRegime::original;
  const std::int64_t kn = std::int64_t{c.kv_heads} * c.head_dim;
  const int bytes = static_cast<int>(size_of(s.dtype));

  nonfinite_.assign(slots.size(), 0);
  x_.resize(static_cast<std::size_t>(n * c.hidden));
  for (std::int64_t r = 0; r < n; ++r) model_->embed(tokens[static_cast<std::size_t>(r)], x_.data() + r * c.hidden);
  qkv_.resize(static_cast<std::size_t>(n), c, raw);
  attention_.resize(static_cast<std::size_t>(n * c.heads * c.head_dim));
  std::vector<std::int32_t> position(static_cast<std::size_t>(n));
  for (std::size_t r = 0; r < slots.size(); ++r) position[r] = store_.position(slots[r]);
  angles_.clear();
  if (!raw)
    for (int at : position) add_angle(at);

  for (int layer = 0; layer < c.layers; ++layer) {
    const ModelLayer& l = model_->layers[static_cast<std::size_t>(layer)];
    project(l, x_.data(), n, 0);
    if (raw) {
      qkv_.raw_q = qkv_.q;
      ops::round_to(qkv_.k.data(), n * kn, bytes);
      qkv_.raw_k = qkv_.k;
    }
    for (std::int64_t r = 0; r < n; ++r) {
      rotate_token(layer, slots[static_cast<std::size_t>(r)], r, 0);
      look_at_entries(r, r, 1);
    }
    {
      const PartTimer timer(Part::append);
      const float* k = regime == RopeRegime::cache_relative ? qkv_.raw_k.data() : qkv_.k.data();
      for (std::size_t r = 0; r < slots.size(); ++r) {
        const std::int64_t at = static_cast<std::int64_t>(r) * kn;
        if (store_.append(layer, slots[r], k + at, qkv_.v.data() + at, 1, position[r]) != Fit::ok)
          return Fit::out_of_memory;
      }
    }
    DecodeLayer info;
    info.layer = layer;
    info.slots = &slots;
    info.queries = heads_view(qkv_.q, n, c.heads, c.head_dim);
    info.keys = heads_view(qkv_.k, n, c.kv_heads, c.head_dim);
    info.values = heads_view(qkv_.v, n, c.kv_heads, c.head_dim);
    if (raw) {
      info.raw_queries = heads_view(qkv_.raw_q, n, c.heads, c.head_dim);
      info.raw_keys = heads_view(qkv_.raw_k, n, c.kv_heads, c.head_dim);
    }
    Fit fit = Fit::ok;
    info.read = hooks.select(info, fit);
    if (fit != Fit::ok) return fit;
    {
      const PartTimer timer(Part::attend);
      ops::AttendArgs a;
      a.kv = store_.view(layer, slots);
      a.queries = info.queries;
      a.pages = info.read.pages;
      a.tokens = info.read.tokens;
      a.softmax_scale = 1.f / std::sqrt(static_cast<float>(c.head_dim));
      a.window = c.sliding_window;
      a.last = position.data();
      a.out = heads_view(attention_, n, c.heads, c.head_dim);
      if (hooks.wants_mass()) {
        const std::int64_t longest = store_.max_length(layer, slots);
        mass_.resize(static_cast<std::size_t>(n * c.heads * longest));
        a.mass = View<float, 3>::dense(mass_.data(), {n, c.heads, longest});
        info.mass = a.mass;
      }
      ops::attend(a, store_.workspace(), Stream::cpu());
      info.output = a.out;
      if (a.mass)
        for (std::int64_t r = 0; r < n; ++r) look_at(r, mass_.data() + r * a.mass.stride[0], a.mass.stride[0]);
    }
    fit = hooks.attended(info);
    store_.workspace().reset();
    if (fit != Fit::ok) return fit;
    finish_layer(l, attention_.data(), x_.data(), n);
  }
  if (const Fit fit = hooks.finish_step(slots); fit != Fit::ok) return fit;
  for (int slot : slots)
    if (store_.advance(slot, 1, true).fit != Fit::ok) return Fit::out_of_memory;
  View<float, 2> logits = out.logits;
  if (!logits && !out.likeliest.empty()) {
    logits_.resize(static_cast<std::size_t>(n * c.vocab));
    logits = View<float, 2>::dense(logits_.data(), {n, c.vocab});
  }
  if (logits) logits_of(x_.data(), n, logits);
  for (std::int64_t r = 0; logits && r < n; ++r) look_at(r, logits.data + r * logits.stride[0], c.vocab);
  note_rows();
  for (std::size_t r = 0; r < out.likeliest.size(); ++r) {
    const float* row = logits.data + static_cast<std::int64_t>(r) * logits.stride[0];
    out.likeliest[r] = nonfinite_[r] ? -1 : static_cast<std::int32_t>(std::max_element(row, row + c.vocab) - row);
  }
  return Fit::ok;
}

}  // namespace kvlab
