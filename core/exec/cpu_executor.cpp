#include "exec/cpu_executor.hpp"

#include <kvlab/error.hpp>

#include <algorithm>
#include <cmath>

#include "base/part_timer.hpp"
#include "ops/attend/attend.hpp"
#include "ops/attend/attend_made_up.hpp"
#include "ops/attend/attend_prompt.hpp"
#include "ops/attend/left_out.hpp"
#include "ops/linear/norm.hpp"
#include "ops/page/causal.hpp"
#include "ops/page/paged.hpp"

namespace kvlab {
namespace {

constexpr std::int64_t row_block = 512;  // prompt rows that pass the MLP together; it bounds activation memory

View<float, 3> heads_view(std::vector<float>& data, std::int64_t rows, std::int64_t heads, std::int64_t dim) {
  return View<float, 3>::dense(data.data(), {rows, heads, dim});
}

void rms_norm(const float* x, const std::vector<float>& weight, float eps, std::int64_t rows, std::int64_t n,
              float* out) {
  ops::NormArgs a;
  a.x = x, a.out = out;
  a.rows = rows, a.n = a.x_stride = a.out_stride = n;
  a.weight = weight.data(), a.eps = eps;
  a.dtype = DType::f32;
  ops::rms_norm(a, Stream::cpu());
}

}  // namespace

CpuExecutor::CpuExecutor(std::shared_ptr<const Model> model, CpuStore& store)
    : Executor(std::move(model), store), store_(store) {}

void CpuExecutor::Qkv::resize(std::size_t rows, const ModelConfig& c, bool raw) {
  const std::size_t query = rows * static_cast<std::size_t>(c.heads * c.head_dim);
  const std::size_t key = rows * static_cast<std::size_t>(c.kv_heads * c.head_dim);
  q.resize(query);
  k.resize(key);
  v.resize(key);
  if (raw) raw_q.resize(query), raw_k.resize(key);
}

// Projects `rows` rows of x to rows [at, at + rows) of qkv_, with biases and QK norm, before RoPE.
void CpuExecutor::project_block(const ModelLayer& l, const float* x, std::int64_t rows, std::int64_t at) {
  const ModelConfig& c = model_->config;
  const std::int64_t qn = std::int64_t{c.heads} * c.head_dim, kn = std::int64_t{c.kv_heads} * c.head_dim,
                     n = qn + 2 * kn;
  hidden_.resize(static_cast<std::size_t>(rows * c.hidden));
  wide_.resize(static_cast<std::size_t>(rows * n));
  rms_norm(x, l.input_norm, c.rms_eps, rows, c.hidden, hidden_.data());
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
      rms_norm(y, l.query_norm, c.rms_eps, c.heads, c.head_dim, q);
      rms_norm(y + qn, l.key_norm, c.rms_eps, c.kv_heads, c.head_dim, k);
    }
    std::copy(y + qn + kn, y + n, qkv_.v.data() + (at + r) * kn);
  }
}

void CpuExecutor::project_output(int layer, int head, const float* x, std::int64_t rows, float* y) const {
  const PartTimer timer(Part::gemm);
  const ops::Linear& output = model_->layers[static_cast<std::size_t>(layer)].output;
  const std::int64_t dim = model_->config.head_dim, most = 256;                          // rows together
  std::vector<float> wide(static_cast<std::size_t>(std::min(rows, most) * output.k()));  // zeros but for the head
  for (std::int64_t at = 0; at < rows; at += most) {
    const std::int64_t count = std::min(most, rows - at);
    for (std::int64_t r = 0; r < count; ++r)
      std::copy_n(x + (at + r) * dim, dim, wide.data() + r * output.k() + head * dim);
    output.apply(wide.data(), output.k(), y + at * output.n(), output.n(), count);
  }
}

void CpuExecutor::queries_ahead(int layer, std::int64_t rows, float* out) {
  const ModelConfig& c = model_->config;
  const auto at = static_cast<std::size_t>(layer);
  const ModelLayer &own = model_->layers.at(at), &next = model_->layers.at(at + 1);
  const std::int64_t qn = std::int64_t{c.heads} * c.head_dim, n = next.qkv.n(), half = c.head_dim / 2;
  hidden_.resize(static_cast<std::size_t>(rows * c.hidden));
  wide_.resize(static_cast<std::size_t>(rows * n));
  rms_norm(x_.data(), own.input_norm, c.rms_eps, rows, c.hidden, hidden_.data());
  {
    const PartTimer timer(Part::gemm);
    next.qkv.apply(hidden_.data(), c.hidden, wide_.data(), n, rows);
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    float *y = wide_.data() + r * n, *q = out + r * qn;
    if (!next.qkv_bias.empty()) ops::add(next.qkv_bias.data(), n, y);
    if (next.query_norm.empty())
      std::copy(y, y + qn, q);
    else
      rms_norm(y, next.query_norm, c.rms_eps, c.heads, c.head_dim, q);
    const float* angle = angles_.data() + r * c.head_dim;
    for (int h = 0; h < c.heads; ++h) ops::rotate_with(q + h * c.head_dim, angle, angle + half, c.head_dim);
  }
}

// x += output projection of attention, then x += MLP(x).
void CpuExecutor::finish_layer(int layer, std::int64_t rows) {
  const ModelConfig& c = model_->config;
  const ModelLayer& l = model_->layers[static_cast<std::size_t>(layer)];
  const std::int64_t qn = std::int64_t{c.heads} * c.head_dim;
  for (std::int64_t begin = 0; begin < rows; begin += row_block) {
    const std::int64_t count = std::min(row_block, rows - begin);
    float* xb = x_.data() + begin * c.hidden;
    hidden_.resize(static_cast<std::size_t>(count * c.hidden));
    wide_.resize(static_cast<std::size_t>(count * 2 * c.ffn));
    {
      const PartTimer timer(Part::gemm);
      l.output.apply(attention_.data() + begin * qn, qn, hidden_.data(), c.hidden, count);
    }
    if (!l.output_bias.empty())
      for (std::int64_t r = 0; r < count; ++r) ops::add(l.output_bias.data(), c.hidden, hidden_.data() + r * c.hidden);
    ops::add(hidden_.data(), count * c.hidden, xb);
    rms_norm(xb, l.post_norm, c.rms_eps, count, c.hidden, hidden_.data());
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

// Rotates query and key of one row of qkv_. In the original regime it uses the row's text position, otherwise the rank
// length + ahead that the token takes in its head's cache.
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
  rms_norm(x, model_->final_norm, c.rms_eps, rows, c.hidden, hidden_.data());
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

void CpuExecutor::begin(std::span<const int> tokens, const std::vector<std::int32_t>& position, Phase phase) {
  const ModelConfig& c = model_->config;
  const std::size_t n = tokens.size();
  tokens_.assign(tokens.begin(), tokens.end());
  position_ = position;
  nonfinite_.assign(phase == Phase::decode ? n : 1, 0);
  x_.resize(n * static_cast<std::size_t>(c.hidden));
  qkv_.resize(n, c, by_rank());
  attention_.resize(n * static_cast<std::size_t>(c.heads * c.head_dim));
  angles_.clear();
  if (!by_rank())
    for (const int at : position) add_angle(at);
}

void CpuExecutor::embed(std::int64_t rows) {
  for (std::int64_t r = 0; r < rows; ++r)
    model_->embed(tokens_[static_cast<std::size_t>(r)], x_.data() + r * model_->config.hidden);
}

void CpuExecutor::project(int layer, std::int64_t rows) {
  const ModelLayer& l = model_->layers[static_cast<std::size_t>(layer)];
  for (std::int64_t begin = 0; begin < rows; begin += row_block)
    project_block(l, x_.data() + begin * model_->config.hidden, std::min(row_block, rows - begin), begin);
  if (!by_rank()) return;
  qkv_.raw_q = qkv_.q;
  // Keys that are cached before RoPE are rounded before RoPE.
  ops::round_to(qkv_.k.data(), rows * key_width(), static_cast<int>(size_of(store_.shape().dtype)));
  qkv_.raw_k = qkv_.k;
}

LayerRows CpuExecutor::rows_of(int layer, std::int64_t rows) {
  const ModelConfig& c = model_->config;
  LayerRows out;
  out.layer = layer;
  out.queries = heads_view(qkv_.q, rows, c.heads, c.head_dim);
  out.keys = heads_view(qkv_.k, rows, c.kv_heads, c.head_dim);
  out.values = heads_view(qkv_.v, rows, c.kv_heads, c.head_dim);
  if (by_rank()) {
    out.raw_queries = heads_view(qkv_.raw_q, rows, c.heads, c.head_dim);
    out.raw_keys = heads_view(qkv_.raw_k, rows, c.kv_heads, c.head_dim);
  }
  return out;
}

const float* CpuExecutor::cached_keys() const {
  return (store_.options().rope == RopeRegime::cache_relative ? qkv_.raw_k : qkv_.k).data();
}

// Rows of a chunk as attention takes them and as they are appended.
void CpuExecutor::make_rows(PromptLayer& info, std::int64_t n) {
  const ModelConfig& c = model_->config;
  info.past = 0;
  for (int head = 0; head < c.kv_heads; ++head)
    info.past = std::max(info.past, store_.length(info.layer, info.slot, head));
#pragma omp parallel for schedule(static) if (n > 16)
  for (std::int64_t t = 0; t < n; ++t) rotate_token(info.layer, info.slot, t, t);
  const int bytes = static_cast<int>(size_of(store_.shape().dtype));
  if (store_.options().rope != RopeRegime::cache_relative) ops::round_to(qkv_.k.data(), n * key_width(), bytes);
  ops::round_to(qkv_.v.data(), n * key_width(), bytes);
  look_at_entries(0, 0, n);
  static_cast<LayerRows&>(info) = rows_of(info.layer, n);
}

Fit CpuExecutor::append_prompt(PromptLayer& info, std::int64_t n, int first) {
  make_rows(info, n);
  const PartTimer timer(Part::append);
  return store_.append(info.layer, info.slot, cached_keys(), qkv_.v.data(), static_cast<int>(n), first);
}

// Each token is a row that sees one token more than the row before.
void CpuExecutor::attend_chosen(PromptLayer& info, std::int64_t n, int, const Selection& read) {
  const PartTimer timer(Part::attend);
  const ModelConfig& c = model_->config;
  std::vector<std::int32_t> rows, lengths;
  for (std::int64_t t = 0; t < n; ++t) {
    rows.push_back(static_cast<std::int32_t>(t));
    for (int head = 0; head < c.kv_heads; ++head)
      lengths.push_back(store_.length(info.layer, info.slot, head) - static_cast<int>(n - 1 - t));
  }
  const std::vector<std::int32_t> slots{info.slot};
  ops::AttendArgs a;
  a.kv = store_.view(info.layer, slots);
  a.kv.table.data += info.slot * a.kv.table.stride[0];
  a.kv.table.extent[0] = n, a.kv.table.stride[0] = 0;
  a.kv.length = View<const std::int32_t, 2>::dense(lengths.data(), {n, c.kv_heads});
  a.kv.slots = rows.data();
  a.kv.rows = static_cast<int>(n);
  a.queries = info.queries;
  std::vector<std::int32_t> counts(static_cast<std::size_t>((n + 1) * c.kv_heads));
  PageList pages;
  if (read.pages) {
    pages = ops::causal_pages(*read.pages, info.slot, a.kv, counts.data(), Stream::cpu());
    a.pages = &pages;
  }
  a.most_distance = read.most_distance;
  a.softmax_scale = 1.f / std::sqrt(static_cast<float>(c.head_dim));
  a.window = c.sliding_window;
  a.last = position_.data();
  a.out = heads_view(attention_, n, c.heads, c.head_dim);
  if (read.pages || read.most_distance > 0) {
    lse_.resize(static_cast<std::size_t>(n * c.heads));
    a.lse = View<float, 2>::dense(lse_.data(), {n, c.heads});
    info.lse = View<const float, 2>{lse_.data(), {c.heads, n}, {1, c.heads}};
  }
  ops::attend(a, workspace_, Stream::cpu());
  workspace_.reset();
  info.output = a.out;
}

Fit CpuExecutor::attend_prompt(PromptLayer& info, std::int64_t n, int first, bool mass) {
  const ModelConfig& c = model_->config;
  const Shape& s = store_.shape();
  const std::vector<std::int32_t> slots{info.slot};
  make_rows(info, n);
  {
    const PartTimer timer(Part::attend);
    ops::PromptArgs a;
    a.kv = store_.view(info.layer, slots);
    a.queries = info.queries;
    a.keys = info.keys;
    a.values = info.values;
    a.softmax_scale = 1.f / std::sqrt(static_cast<float>(c.head_dim));
    a.window = c.sliding_window;
    a.masks = info.masks;
    a.first = first;
    a.out = heads_view(attention_, n, c.heads, c.head_dim);
    a.round_to_bf16 = s.dtype == DType::bf16;
    if (mass) {
      const std::int64_t width = info.past + n;
      mass_.resize(static_cast<std::size_t>(c.heads * width));
      a.sums = View<float, 2>::dense(mass_.data(), {c.heads, width});
      info.mass = a.sums;
    }
    ops::attend_prompt(a, workspace_, Stream::cpu());
    workspace_.reset();
    info.output = a.out;
    if (a.sums) look_at(0, mass_.data(), static_cast<std::int64_t>(mass_.size()));
  }
  const PartTimer timer(Part::append);
  return store_.append(info.layer, info.slot, cached_keys(), qkv_.v.data(), static_cast<int>(n), first);
}

Fit CpuExecutor::append(int layer, const std::vector<std::int32_t>& slots) {
  for (std::size_t r = 0; r < slots.size(); ++r) {
    const auto row = static_cast<std::int64_t>(r);
    rotate_token(layer, slots[r], row, 0);
    look_at_entries(row, row, 1);
  }
  const PartTimer timer(Part::append);
  for (std::size_t r = 0; r < slots.size(); ++r) {
    const std::int64_t at = static_cast<std::int64_t>(r) * key_width();
    if (store_.append(layer, slots[r], cached_keys() + at, qkv_.v.data() + at, 1, position_[r]) != Fit::ok)
      return Fit::out_of_memory;
  }
  return Fit::ok;
}

View<float, 3> CpuExecutor::step_mass(std::int64_t rows, std::int64_t tokens) {
  const int heads = model_->config.heads;
  mass_.resize(static_cast<std::size_t>(rows * heads * tokens));
  return View<float, 3>::dense(mass_.data(), {rows, heads, tokens});
}

View<const float, 3> CpuExecutor::attend(int layer, const std::vector<std::int32_t>& slots, const Selection& read,
                                         const View<float, 3>& mass, ops::MassColumn mass_into) {
  const PartTimer timer(Part::attend);
  const ModelConfig& c = model_->config;
  const auto n = static_cast<std::int64_t>(slots.size());
  ops::AttendArgs a;
  a.kv = store_.view(layer, slots);
  a.queries = heads_view(qkv_.q, n, c.heads, c.head_dim);
  a.pages = read.pages;
  a.tokens = read.tokens;
  a.logits = read.logits;
  a.bias = read.bias;
  a.most_distance = read.most_distance;
  a.softmax_scale = 1.f / std::sqrt(static_cast<float>(c.head_dim));
  a.window = c.sliding_window;
  a.last = position_.data();
  a.out = heads_view(attention_, n, c.heads, c.head_dim);
  a.mass = mass;
  a.mass_into = mass_into;
  if (read.made_up) {
    lse_.resize(static_cast<std::size_t>(n * c.heads));
    a.lse = View<float, 2>::dense(lse_.data(), {n, c.heads});
  }
  ops::attend(a, workspace_, Stream::cpu());
  workspace_.reset();
  if (read.made_up) ops::attend_made_up(a, read.made_up, Stream::cpu());
  for (std::int64_t r = 0; mass && r < n; ++r) look_at(r, mass_.data() + r * mass.stride[0], mass.stride[0]);
  return a.out;
}

void CpuExecutor::fill_left_out(int layer, const std::vector<std::int32_t>& slots, const LeftOut& what) {
  const PartTimer timer(Part::attend);
  const ModelConfig& c = model_->config;
  ops::blend_left_out(store_.view(layer, slots), what,
                      heads_view(attention_, static_cast<std::int64_t>(slots.size()), c.heads, c.head_dim), nullptr,
                      Stream::cpu());
}

void CpuExecutor::prompt_logits(std::int64_t rows, const View<float, 2>& of_last) {
  const ModelConfig& c = model_->config;
  const std::int64_t wanted = of_last ? of_last.extent[0] : 0;
  if (wanted > 0) logits_of(x_.data() + (rows - wanted) * c.hidden, wanted, of_last);
  for (std::int64_t r = 0; r < wanted; ++r) look_at(0, of_last.data + r * of_last.stride[0], c.vocab);
  note_rows();
}

void CpuExecutor::head(std::int64_t rows, const StepResult& out) {
  const ModelConfig& c = model_->config;
  step_logits_ = out.logits;
  if (!out.logits && !out.likeliest.empty()) {
    logits_.resize(static_cast<std::size_t>(rows * c.vocab));
    step_logits_ = View<float, 2>::dense(logits_.data(), {rows, c.vocab});
  }
  if (step_logits_) logits_of(x_.data(), rows, step_logits_);
}

void CpuExecutor::read(std::int64_t rows, const StepResult& out) {
  const ModelConfig& c = model_->config;
  const auto row = [&](std::int64_t r) { return step_logits_.data + r * step_logits_.stride[0]; };
  for (std::int64_t r = 0; step_logits_ && r < rows; ++r) look_at(r, row(r), c.vocab);
  note_rows();
  for (std::size_t r = 0; r < out.likeliest.size(); ++r) {
    const float* logits = row(static_cast<std::int64_t>(r));
    out.likeliest[r] =
        nonfinite_[r] ? -1 : static_cast<std::int32_t>(std::max_element(logits, logits + c.vocab) - logits);
  }
}

}  // namespace kvlab
