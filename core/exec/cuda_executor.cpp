#include "exec/cuda_executor.hpp"

#include <algorithm>
#include <cmath>
#include <kvlab/error.hpp>
#include <optional>
#include <utility>

#include "base/backend.hpp"
#include "base/device_op.hpp"
#include "base/finite.hpp"
#include "base/late_state.hpp"
#include "base/part_events.hpp"
#include "base/part_timer.hpp"
#include "ops/attend/attend.hpp"
#include "ops/attend/attend_made_up.hpp"
#include "ops/attend/attend_prompt.hpp"
#include "ops/attend/late_mass.hpp"
#include "ops/attend/left_out.hpp"
#include "ops/linear/argmax.hpp"
#include "ops/linear/embed.hpp"
#include "ops/linear/norm.hpp"
#include "ops/page/causal.hpp"
#include "ops/page/paged.hpp"
#include "ops/page/prompt_pages.hpp"
#include "ops/page/rope_rank.hpp"
#include "ops/retrieve/attend_chosen.hpp"
#include "ops/score/add_rows.hpp"

namespace kvlab {
namespace {

constexpr std::int64_t row_block = 4096;  // prompt rows that pass the MLP together; it bounds activation memory
constexpr std::int64_t mass_rows = 32;    // rows of a prompt whose mass has room at once

// Steps of up to 1024 more tokens find the buffer of their mass at the same address.
std::int64_t mass_room(std::int64_t tokens) { return (tokens + 1023) / 1024 * 1024; }

[[noreturn]] void refuse(const std::string& what) { throw Error(Errc::unsupported, what, "the executor on CUDA"); }

const CudaModel& weights_of(const Model& m) {
  if (!m.cuda) refuse("got model " + m.name + " loaded for the CPU, wanted one loaded for CUDA");
  return *m.cuda;
}

}  // namespace

void CudaExecutor::check(const Model& model) {
  const ModelConfig& c = model.config;
  if (model.dtype != DType::bf16 && model.dtype != DType::f16)
    refuse(std::string("got dtype ") + name_of(model.dtype) + ", wanted bf16 or f16");
  if (c.hidden % 8 || c.ffn % 8)
    refuse("got hidden size " + std::to_string(c.hidden) + " and MLP size " + std::to_string(c.ffn) +
           ", wanted multiples of 8");
}

// Returns m with room for at least `count` elements. The contents are lost if m has to grow.
template <class T>
T* CudaExecutor::room(StreamMemory& m, std::int64_t count) {
  const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
  if (m.bytes() < bytes) {
    ++grown_;
    m = StreamMemory();
    m = StreamMemory(stream_, bytes);
  }
  return m.as<T>();
}

// Most bytes of mass that waits. 64 sequences of a budget of 2048 tokens take 300 MB in Llama 3.1 8B's shape.
constexpr std::int64_t most_late_mass = std::int64_t{384} << 20;

static std::int64_t late_bytes(const Shape& s, std::int64_t rows, std::int64_t tokens) {
  return s.layers * ops::LateMass::bytes(rows, s.query_heads, s.kv_heads, tokens);
}

std::int64_t late_mass_bytes(const Shape& s) {
  if (s.page_size % ops::ShareLayout::tokens) return 0;
  return std::min(most_late_mass, late_bytes(s, s.max_slots, s.max_tokens));
}

std::int64_t mass_bytes(const Shape& s, Mass wanted) {
  if (wanted == Mass::none) return 0;
  const std::int64_t of_step = s.max_slots * mass_room(s.max_tokens), sums = s.max_tokens;
  const std::int64_t numbers = wanted == Mass::all ? std::max(of_step, mass_rows * s.max_tokens) + sums : of_step;
  return numbers * s.query_heads * static_cast<std::int64_t>(sizeof(float));
}

CudaExecutor::CudaExecutor(std::shared_ptr<const Model> model, CudaStore& store, bool batch_invariant)
    : Executor(std::move(model), store),
      store_(store),
      batch_invariant_(batch_invariant),
      weights_(weights_of(*model_)),
      stream_(store.stream()) {
  check(*model_);
  const Shape& s = store_.shape();
  copy_layout_ = ops::make_layout(s.dtype, {}, s.page_size, s.head_dim, 0);
  const std::size_t half = static_cast<std::size_t>(model_->config.head_dim / 2),
                    most = static_cast<std::size_t>(store_.shape().max_tokens);
  std::vector<float> cosine(most * half), sine(most * half);
#pragma omp parallel for schedule(static)
  for (std::size_t i = 0; i < most; ++i)
    ops::rope_angles(model_->rope(), static_cast<double>(i), cosine.data() + i * half, sine.data() + i * half);
  cosine_ = StreamMemory(stream_, cosine.size() * sizeof(float));
  sine_ = StreamMemory(stream_, sine.size() * sizeof(float));
  copy_memory(cosine_.as<>(), cosine.data(), cosine_.bytes(), stream_);
  copy_memory(sine_.as<>(), sine.data(), sine_.bytes(), stream_);
  synchronize(stream_);
}

// Returns the f32 rows that attention_ needs room for. A prompt may also write up to prompt_room 16-bit rows there.
std::int64_t CudaExecutor::attention_rows(std::int64_t tokens) {
  return std::max<std::int64_t>(tokens, ops::prompt_room(static_cast<int>(tokens)) / 2);
}

void CudaExecutor::begin(std::span<const int> tokens, const std::vector<std::int32_t>& position, Phase phase) {
  const ModelConfig& c = model_->config;
  const std::int64_t n = static_cast<std::int64_t>(tokens.size());
  phase_ = phase;
  keeps_rows_ = false;
  static_assert(sizeof(int) == sizeof(std::int32_t));
  copy_memory(room<std::int32_t>(tokens_, n), tokens.data(), tokens.size_bytes(), stream_);
  copy_memory(room<std::int32_t>(position_, n), position.data(), position.size() * sizeof(std::int32_t), stream_);
  room<float>(qkv_, n * qkv_width());
  room<float>(attention_, attention_rows(n) * c.heads * c.head_dim);
  const std::int64_t block = std::min(n, row_block);
  room<std::uint16_t>(normed_, (fuses_norms(n) ? n : block) * c.hidden);
  if (fuses_norms(n)) room<float>(squares_, n * c.hidden / ops::norm_piece);
  room<std::uint16_t>(gated_, block * c.ffn);
  room<float>(x_, n * c.hidden);
  const std::int64_t marks = decoding() ? n : 1;
  if (nonfinite_.bytes() < static_cast<std::size_t>(marks) * sizeof(std::int32_t)) {
    room<std::int32_t>(nonfinite_, marks);
    zero_memory(nonfinite_.as<>(), nonfinite_.bytes(), stream_);
  }
  nonfinite_rows_.clear();
  rounded_queries_ = phase == Phase::prompt && rounds_queries(n) ? rounded_queries(n) : nullptr;
  if (decoding()) room<std::uint16_t>(rounded_, n * c.heads * c.head_dim);
}

void CudaExecutor::note_prompt(const View<float, 2>& logits) {
  std::int32_t mark = 0;
  copy_memory(&mark, nonfinite_.as<>(), sizeof mark, stream_);
  synchronize(stream_);
  if (mark) zero_memory(nonfinite_.as<>(), sizeof mark, stream_);
  std::int64_t found = mark;
  for (std::int64_t r = 0; logits && r < logits.extent[0]; ++r)
    found += count_nonfinite(logits.data + r * logits.stride[0], logits.extent[1]);
  if (found > 0) nonfinite_rows_ = {0};
}

void CudaExecutor::embed(std::int64_t rows) {
  const PartTimer timer(Part::other);  // the step's first part; time between two parts counts as `other`
  ops::EmbedArgs e;
  e.table = weights_.tokens().memory.as<>();
  e.dtype = weights_.dtype;
  e.vocabulary = weights_.tokens().n;
  e.k = model_->config.hidden;
  e.token = tokens_.as<std::int32_t>();
  e.rows = rows;
  e.out = x_.as<float>();
  ops::embed(e, stream_);
}

// Arguments of y [rows, n] = x W^T + bias, where x is dense.
ops::LinearArgs CudaExecutor::product(const CudaMatrix& w, const void* x, DType x_dtype, std::int64_t rows,
                                      const StreamMemory& bias, float* y, std::int64_t y_stride) const {
  ops::LinearArgs a;
  a.weight = w.memory.as<>();
  a.n = w.n, a.k = w.k;
  a.dtype = weights_.dtype;
  a.x = x, a.x_dtype = x_dtype;
  a.m = rows, a.x_stride = w.k;
  a.bias = bias.as<float>();
  a.y = y, a.y_stride = y_stride;
  return a;
}

// Returns whether the products of these rows leave and take norms, so that no norm has a launch of its own.
bool CudaExecutor::fuses_norms(std::int64_t rows) const {
  return decoding() && weights_.dtype == DType::bf16 && model_->config.hidden % (4 * ops::norm_piece) == 0 &&
         std::min(rows, rows_together()) <= ops::linear_stream_rows;
}

// Adds the product's outputs to rows of x_ from `at` on. With `leave` it also leaves their norm in normed_, squares_.
void CudaExecutor::add_to_x(ops::LinearArgs a, std::int64_t at, const StreamMemory& norm, bool leave) {
  const std::int64_t hidden = model_->config.hidden;
  a.y = x_.as<float>() + at * hidden, a.y_stride = hidden;
  a.add = true;
  if (leave) {
    a.left.weight = norm.as<float>();
    a.left.out = normed_.as<std::uint16_t>() + at * hidden, a.left.out_stride = hidden;
    a.left.squares = squares_.as<float>() + at * hidden / ops::norm_piece;
  }
  ops::linear(a, stream_);
}

// Returns the norm of the rows of x_ from `at` on, rounded, in normed_. If an earlier product left it, fills `taken`
// for the next product.
const void* CudaExecutor::normed(std::int64_t at, std::int64_t rows, const StreamMemory& weight, bool left,
                                 ops::NormTaken& taken) {
  const ModelConfig& c = model_->config;
  if (!left) {
    norm(x_.as<float>() + at * c.hidden, weight, rows, normed_.as<>());
    return normed_.as<>();
  }
  taken.squares = squares_.as<float>() + at * c.hidden / ops::norm_piece;
  taken.eps = c.rms_eps;
  return normed_.as<std::uint16_t>() + at * c.hidden;
}

void CudaExecutor::norm(const float* x, const StreamMemory& weight, std::int64_t rows, void* out) {
  const ModelConfig& c = model_->config;
  ops::NormArgs a;
  a.x = x;
  a.rows = rows, a.n = c.hidden, a.x_stride = c.hidden;
  a.weight = weight.as<float>();
  a.eps = c.rms_eps;
  a.out = out;
  a.dtype = weights_.dtype;
  a.out_stride = c.hidden;
  ops::rms_norm(a, stream_);
}

// Returns the rows of one product. Above linear_stream_rows their number changes the order of additions.
std::int64_t CudaExecutor::rows_together() const {
  return batch_invariant_ && decoding() ? ops::linear_stream_rows : row_block;
}

void CudaExecutor::project(int layer, std::int64_t rows) {
  const PartTimer timer(Part::gemm);
  const CudaLayer& l = weights_.layers[static_cast<std::size_t>(layer)];
  const std::int64_t block = rows_together();
  const bool left = layer > 0 && fuses_norms(rows);
  qkv_at_ = keeps_rows_ ? layer * rows * qkv_width() : 0;
  for (std::int64_t at = 0; at < rows; at += block) {
    const std::int64_t count = std::min(block, rows - at);
    ops::NormTaken taken;
    const void* x = normed(at, count, l.input_norm, left, taken);
    ops::LinearArgs a = product(l.qkv, x, weights_.dtype, count, l.qkv_bias, qkv() + at * qkv_width(), qkv_width());
    a.taken = taken;
    ops::linear(a, stream_);
  }
}

// The norm of this layer's input is in normed_ still, if the product before left it there.
void CudaExecutor::queries_ahead(int layer, std::int64_t rows, float* out) {
  const PartTimer timer(Part::gemm);
  const ModelConfig& c = model_->config;
  const auto own = static_cast<std::size_t>(layer);
  const CudaLayer& next = weights_.layers.at(own + 1);
  const std::int64_t block = rows_together(), width = std::int64_t{c.heads} * c.head_dim;
  const bool left = layer > 0 && fuses_norms(rows);
  for (std::int64_t at = 0; at < rows; at += block) {
    const std::int64_t count = std::min(block, rows - at);
    ops::NormTaken taken;
    const void* x = normed(at, count, weights_.layers[own].input_norm, left, taken);
    ops::LinearArgs a = product(next.qkv, x, weights_.dtype, count, next.qkv_bias, out + at * width, width);
    a.n = width;  // queries come first
    a.taken = taken;
    ops::linear(a, stream_);
  }
  ops::RopeAppendArgs a = rope(layer + 1, rows);
  a.qkv = out, a.qkv_stride = width;
  a.kv_heads = 0;
  a.append = false;
  a.nonfinite = nullptr;
  ops::rope_append(a, stream_);
}

ops::RopeAppendArgs CudaExecutor::rope(int layer, std::int64_t rows) {
  const ModelConfig& c = model_->config;
  const CudaLayer& l = weights_.layers[static_cast<std::size_t>(layer)];
  ops::RopeAppendArgs a;
  a.rows = static_cast<int>(rows);
  a.heads = c.heads, a.kv_heads = c.kv_heads, a.head_dim = c.head_dim;
  a.qkv = qkv();
  a.qkv_stride = qkv_width();
  a.query_norm = l.query_norm.as<float>(), a.key_norm = l.key_norm.as<float>();
  a.eps = c.rms_eps;
  a.turn = !by_rank();
  a.cosine = cosine_.as<float>(), a.sine = sine_.as<float>();
  a.angles = store_.shape().max_tokens;
  a.position = position_.as<std::int32_t>();
  a.nonfinite = nonfinite_.as<std::int32_t>();
  a.nonfinite_step = decoding() ? 1 : 0;
  return a;
}

// Runs QK norm and RoPE for one token of each slot and appends it to the cache.
Fit CudaExecutor::append(int layer, const std::vector<std::int32_t>& slots) {
  const PartTimer timer(Part::append);
  ops::RopeAppendArgs a = rope(layer, static_cast<std::int64_t>(slots.size()));
  if (re_rotated()) {
    a.append = false;
    ops::rope_append(a, stream_);
    turn(store_.view(layer, slots), true);
    a.append = true;
    a.qkv = turned_.as<float>(), a.qkv_stride = turned_width();
    a.query_norm = a.key_norm = nullptr;
  }
  if (store_.before_step(layer, slots, a) != Fit::ok) return Fit::out_of_memory;
  ops::rope_append(a, stream_);
  if (relative()) turn(store_.view(layer, slots), false);
  return Fit::ok;
}

// Runs QK norm and RoPE for a chunk of one slot. The store appends its keys and values.
Fit CudaExecutor::append_chunk(int layer, int slot, std::int64_t tokens, int first, void* rounded) {
  const PartTimer timer(Part::append);
  const ModelConfig& c = model_->config;
  ops::RopeAppendArgs a = rope(layer, tokens);
  a.append = false;
  a.rounded = rounded;
  a.rounded_dtype = weights_.dtype;
  ops::rope_append(a, stream_);
  if (re_rotated()) {
    PagedKv kv = store_.view(layer, {slot});
    kv.length.data += kv.length.stride[0] * slot;
    kv.rows = static_cast<int>(tokens);
    kv.slots = nullptr;
    turn(kv, true);
  }
  const float* keys = (re_rotated() ? turned_.as<float>() : a.qkv) + std::int64_t{c.heads} * c.head_dim;
  return store_.append(layer, slot, keys, keys + std::int64_t{c.kv_heads} * c.head_dim, DType::f32, qkv_width(),
                       static_cast<int>(tokens), first, nonfinite_.as<std::int32_t>());
}

void CudaExecutor::turn(const PagedKv& kv, bool ahead) {
  const ModelConfig& c = model_->config;
  ops::RopeRankArgs a;
  a.rows = kv.rows;
  a.heads = c.heads, a.kv_heads = c.kv_heads, a.head_dim = c.head_dim;
  a.x = qkv();
  a.x_stride = qkv_width();
  a.out_stride = turned_width();
  a.values = re_rotated() ? c.kv_heads : 0;
  a.out = room<float>(turned_, kv.rows * a.out_stride);
  a.cosine = cosine_.as<float>(), a.sine = sine_.as<float>();
  a.angles = store_.shape().max_tokens;
  a.length = kv.length;
  a.slots = kv.slots;
  if (ahead) a.ahead = 0;
  if (!a.slots) a.step = 1;
  ops::rope_rank(a, stream_);
}

// Returns the view that the rows of a chunk read: the cache, or a copy of the layer.
PagedKv CudaExecutor::chunk_view(int layer, int slot, std::int64_t tokens) {
  const PartTimer timer(Part::attend);
  const ModelConfig& c = model_->config;
  PagedKv rows =
      store_.causal_view(layer, slot, static_cast<int>(tokens), room<std::int32_t>(length_, tokens * c.kv_heads),
                         room<std::int32_t>(rows_, tokens));
  if (relative()) turn(rows, false);
  const CodecSpec codec = rows.layouts->codec;
  if (!relative() && codec.k.bits == 0 && codec.v.bits == 0 && !rows.lower_pages) return rows;
  ops::PromptPagesArgs p;
  p.kv = store_.view(layer, {slot});
  p.tokens = static_cast<int>(tokens);
  const auto keys = turned(tokens, c.heads, c.kv_heads), values = part(tokens, c.heads + c.kv_heads, c.kv_heads);
  p.keys = keys.data, p.key_stride = keys.stride[0];
  p.values = values.data, p.value_stride = values.stride[0];
  p.cosine = cosine_.as<float>(), p.sine = sine_.as<float>();
  p.angles = store_.shape().max_tokens;
  p.layout = copy_layout_;
  const int page_size = store_.shape().page_size;
  p.pages = (store_.max_length(layer, {slot}) + page_size - 1) / page_size;
  const std::int64_t pages = std::int64_t{c.kv_heads} * p.pages;
  p.frames = room<std::byte>(copy_, pages * copy_layout_.bytes);
  p.table = room<PageEntry>(copy_table_, pages);
  ops::prompt_pages(p, stream_);
  rows.base = p.frames;
  rows.layouts = &copy_layout_;
  rows.table = {p.table, {tokens, c.kv_heads, p.pages}, {0, p.pages, 1}};
  rows.lower_pages = {};
  rows.rope = RopeRegime::original;
  return rows;
}

void CudaExecutor::attend_rows(const PagedKv& kv, std::int64_t first_row, const Selection& read, View<float, 3> mass,
                               ops::MassColumn mass_into, const PromptMask* masks, bool leaves_lse,
                               ops::LateMass* late) {
  const PartTimer timer(Part::attend);
  const ModelConfig& c = model_->config;
  const std::int64_t width = std::int64_t{c.heads} * c.head_dim;
  ops::AttendArgs a;
  a.kv = kv;
  a.queries = turned(kv.rows, 0, c.heads);
  a.queries.data += first_row * a.queries.stride[0];
  a.pages = read.pages;
  a.tokens = read.tokens;
  a.logits = read.logits;
  a.bias = read.bias;
  a.most_distance = read.most_distance;
  a.softmax_scale = 1.f / std::sqrt(static_cast<float>(c.head_dim));
  a.window = c.sliding_window;
  a.masks = masks;
  a.last = position_.as<std::int32_t>() + first_row;
  a.out = View<float, 3>::dense(attention_.as<float>() + first_row * width, {kv.rows, c.heads, c.head_dim});
  if (decoding() && rounds(kv)) a.rounded = rounded_.as<std::uint16_t>() + first_row * width;
  a.mass = mass;
  a.mass_into = mass_into;
  a.late = late;
  if (read.made_up || leaves_lse)
    a.lse = View<float, 2>::dense(lse_.as<float>() + first_row * c.heads, {kv.rows, c.heads});
  ops::choose_and_attend(a, store_.workspace(), stream_);
  if (read.made_up) ops::attend_made_up(a, read.made_up, stream_);
}

// Attends for the rows of a decode step one by one. In a shared launch the number of rows decides how tokens are cut
// and so the order of sums.
void CudaExecutor::attend_each(const PagedKv& kv, const Selection& read, const View<float, 3>& mass,
                               ops::MassColumn mass_into) {
  for (std::int64_t r = 0; r < kv.rows; ++r) {
    PagedKv one = kv;
    one.slots += r;
    one.rows = 1;
    const auto of_row = [&](auto& list) {
      list.index.data += r * list.index.stride[0], list.index.extent[0] = 1;
      list.count.data += r * list.count.stride[0], list.count.extent[0] = 1;
      return &list;
    };
    PageList pages = read.pages ? *read.pages : PageList{};
    TokenList tokens = read.tokens ? *read.tokens : TokenList{};
    View<float, 3> sums = mass;
    if (sums) sums.data += r * sums.stride[0], sums.extent[0] = 1;
    HeadLogits logits = read.logits;
    if (logits.out) logits.out.data += r * logits.out.stride[0], logits.out.extent[0] = 1;
    View<const float, 3> bias = read.bias;
    if (bias) bias.data += r * bias.stride[0], bias.extent[0] = 1;
    attend_rows(one, r,
                {read.pages ? of_row(pages) : nullptr, read.tokens ? of_row(tokens) : nullptr, logits, read.made_up,
                 bias, read.most_distance},
                sums, mass_into);
  }
}

// Returns whether attention writes its output in the type that the next product takes.
bool CudaExecutor::rounds(const PagedKv& kv) const { return kv.layouts->dtype == weights_.dtype; }

// Returns whether cuDNN will want a chunk's queries rounded, which RoPE can do.
bool CudaExecutor::rounds_queries(std::int64_t tokens) const {
  return tokens >= ops::prompt_cudnn_rows && !by_rank() && model_->config.sliding_window == 0 &&
         copy_layout_.dtype == weights_.dtype && ops::cudnn_state().there;
}

// Returns a place in attention_ for the rounded queries, behind the 16-bit attention of as many rows. Null = there is
// no room. Then ops::attend_prompt rounds them for cuDNN, or runs our own kernel.
void* CudaExecutor::rounded_queries(std::int64_t tokens) {
  const ModelConfig& c = model_->config;
  const std::int64_t width = std::int64_t{c.heads} * c.head_dim,
                     count = ops::prompt_room(static_cast<int>(tokens)) * width;
  try {
    room<float>(attention_, count);
  } catch (const NoRoom&) {
    room<float>(attention_, attention_rows(tokens) * width);
    return nullptr;
  }
  return attention_.as<std::uint16_t>() + count;
}

DType CudaExecutor::attend_chunk(const PagedKv& all, const PromptLayer& info, int first, int longest,
                                 View<float, 2> sums, View<const float, 2>* lse) {
  const ModelConfig& c = model_->config;
  const std::int64_t tokens = all.rows;
  if (sums) zero_memory(sums.data, static_cast<std::size_t>(sums.extent[0] * sums.extent[1]) * sizeof(float), stream_);
  {
    const PartTimer timer(Part::attend);
    ops::PromptArgs a;
    a.kv = all;
    a.queries = turned(tokens, 0, c.heads);
    a.rounded_queries = rounded_queries_;
    a.window = c.sliding_window;
    a.first = first;
    a.masks = info.masks;
    a.out = View<float, 3>::dense(attention_.as<float>(), {tokens, c.heads, c.head_dim});
    a.sums = sums;
    a.lse = lse;
    a.longest = longest;
    if (phase_ == Phase::prompt && rounds(all)) a.rounded = attention_.as<>();
    if (ops::attend_prompt(a, store_.workspace(), stream_)) return a.rounded ? weights_.dtype : DType::f32;
  }
  if (!sums) {
    attend_rows(all, 0, {}, {}, {}, info.masks);
    return DType::f32;
  }
  float* data = room<float>(mass_, std::min(tokens, mass_rows) * c.heads * sums.extent[1]);
  for (std::int64_t at = 0; at < tokens; at += mass_rows) {
    PagedKv kv = all;
    kv.slots += at;
    kv.rows = static_cast<int>(std::min(mass_rows, tokens - at));
    const auto mass = View<float, 3>::dense(data, {kv.rows, c.heads, sums.extent[1]});
    attend_rows(kv, at, {}, mass, {}, info.masks);
    ops::add_rows(mass, sums, stream_);
  }
  return DType::f32;
}

void CudaExecutor::project_output(int layer, int head, const float* x, std::int64_t rows, float* y) const {
  const PartTimer timer(Part::gemm);
  const CudaMatrix& output = weights_.layers[static_cast<std::size_t>(layer)].output;
  ops::LinearArgs a = product(output, x, DType::f32, rows, {}, y, output.n);
  a.k = a.x_stride = model_->config.head_dim, a.weight_stride = output.k;
  a.weight = output.memory.as<std::byte>() + head * a.k * static_cast<std::int64_t>(size_of(weights_.dtype));
  ops::linear(a, stream_);
}

void CudaExecutor::finish_layer(int layer, std::int64_t rows) {
  const PartTimer timer(Part::gemm);
  const ModelConfig& c = model_->config;
  const CudaLayer& l = weights_.layers[static_cast<std::size_t>(layer)];
  const StreamMemory& next_norm =
      layer + 1 < c.layers ? weights_.layers[static_cast<std::size_t>(layer) + 1].input_norm : weights_.final_norm;
  const std::int64_t block = rows_together();
  const bool fused = fuses_norms(rows);
  for (std::int64_t at = 0; at < rows; at += block) {
    const std::int64_t count = std::min(block, rows - at);
    const auto* from =
        attended_->as<std::byte>() + at * l.output.k * static_cast<std::int64_t>(size_of(attended_type_));
    add_to_x(product(l.output, from, attended_type_, count, l.output_bias, nullptr, 0), at, l.post_norm, fused);
    ops::NormTaken taken;
    const void* x = normed(at, count, l.post_norm, fused, taken);
    ops::LinearArgs a = product(l.gate_up, x, weights_.dtype, count, {}, nullptr, 0);
    a.taken = taken;
    a.gated = gated_.as<>();
    a.gated_stride = c.ffn;
    ops::linear(a, stream_);
    add_to_x(product(l.down, gated_.as<>(), weights_.dtype, count, {}, nullptr, 0), at, next_norm, fused);
  }
}

void CudaExecutor::logits_of_rows(std::int64_t first_row, std::int64_t rows) {
  const PartTimer timer(Part::gemm);
  const CudaMatrix& w = weights_.head;
  float* out = room<float>(logits_, rows * w.n);
  const std::int64_t block = rows_together();
  const bool left = fuses_norms(rows);
  for (std::int64_t at = 0; at < rows; at += block) {
    const std::int64_t count = std::min(block, rows - at);
    ops::NormTaken taken;
    const void* x = normed(first_row + at, count, weights_.final_norm, left, taken);
    ops::LinearArgs a = product(w, x, weights_.dtype, count, {}, out + at * w.n, w.n);
    a.taken = taken;
    ops::linear(a, stream_);
  }
}

void CudaExecutor::logits_of(std::int64_t rows, View<float, 2> out) {
  const std::int64_t n = weights_.head.n;
  for (std::int64_t r = 0; r < rows; ++r)
    copy_memory(out.data + r * out.stride[0], logits_.as<float>() + r * n, static_cast<std::size_t>(n) * sizeof(float),
                stream_);
  synchronize(stream_);
}

View<const float, 3> CudaExecutor::part(std::int64_t rows, std::int64_t first_head, std::int64_t heads) const {
  const std::int64_t dim = model_->config.head_dim;
  return {qkv() + first_head * dim, {rows, heads, dim}, {qkv_width(), dim, 1}};
}

View<const float, 3> CudaExecutor::turned(std::int64_t rows, std::int64_t first_head, std::int64_t heads) const {
  if (!by_rank()) return part(rows, first_head, heads);
  const std::int64_t dim = model_->config.head_dim;
  return {turned_.as<float>() + first_head * dim, {rows, heads, dim}, {turned_width(), dim, 1}};
}

LayerRows CudaExecutor::rows_of(int layer, std::int64_t rows) {
  const ModelConfig& c = model_->config;
  LayerRows out;
  out.layer = layer;
  out.queries = turned(rows, 0, c.heads);
  out.keys = turned(rows, c.heads, c.kv_heads);
  out.values = part(rows, c.heads + c.kv_heads, c.kv_heads);
  if (!by_rank()) return out;
  out.raw_queries = part(rows, 0, c.heads);
  out.raw_keys = part(rows, c.heads, c.kv_heads);
  return out;
}

Fit CudaExecutor::attend_prompt(PromptLayer& info, std::int64_t rows, int first, bool mass) {
  const ModelConfig& c = model_->config;
  const std::vector<std::int32_t> slots{info.slot};
  info.past = store_.max_length(info.layer, slots);
  if (append_chunk(info.layer, info.slot, rows, first, rounded_queries_) != Fit::ok) return Fit::out_of_memory;
  View<float, 2> sums;
  if (mass) {
    const std::int64_t width = info.past + rows;
    sums = View<float, 2>::dense(room<float>(sums_, c.heads * width), {c.heads, width});
  }
  attended_ = &attention_;
  View<const float, 2> lse;
  attended_type_ = attend_chunk(chunk_view(info.layer, info.slot, rows), info, first,
                                store_.max_length(info.layer, slots), sums, info.wants_lse ? &lse : nullptr);
  static_cast<LayerRows&>(info) = rows_of(info.layer, rows);
  info.mass = sums;
  info.lse = lse;
  if (phase_ == Phase::prompt_shown)
    info.output = View<const float, 3>::dense(attention_.as<float>(), {rows, c.heads, c.head_dim});
  return Fit::ok;
}

Fit CudaExecutor::append_prompt(PromptLayer& info, std::int64_t rows, int first) {
  info.past = store_.max_length(info.layer, {info.slot});
  if (append_chunk(info.layer, info.slot, rows, first, rounded_queries_) != Fit::ok) return Fit::out_of_memory;
  static_cast<LayerRows&>(info) = rows_of(info.layer, rows);
  return Fit::ok;
}

void CudaExecutor::attend_chosen(PromptLayer& info, std::int64_t rows, int first, const Selection& read) {
  const ModelConfig& c = model_->config;
  attended_ = &attention_;
  if (!read.pages && read.most_distance == 0) {
    View<const float, 2> lse;
    attended_type_ = attend_chunk(chunk_view(info.layer, info.slot, rows), info, first,
                                  store_.max_length(info.layer, {info.slot}), {}, info.wants_lse ? &lse : nullptr);
    info.lse = lse;
  } else {
    const PagedKv kv =
        store_.causal_view(info.layer, info.slot, static_cast<int>(rows),
                           room<std::int32_t>(length_, (2 * rows + 1) * c.kv_heads), room<std::int32_t>(rows_, rows));
    Selection of_rows = read;
    PageList pages;
    if (read.pages) {
      pages = ops::causal_pages(*read.pages, info.slot, kv, length_.as<std::int32_t>() + rows * c.kv_heads, stream_);
      of_rows.pages = &pages;
    }
    const float* lse = room<float>(lse_, rows * c.heads);
    attend_rows(kv, 0, of_rows, {}, {}, nullptr, true);
    attended_type_ = DType::f32;
    info.lse = View<const float, 2>{lse, {c.heads, rows}, {1, c.heads}};
  }
  if (phase_ == Phase::prompt_shown)
    info.output = View<const float, 3>::dense(attention_.as<float>(), {rows, c.heads, c.head_dim});
}

View<float, 3> CudaExecutor::step_mass(std::int64_t rows, std::int64_t tokens) {
  const int heads = model_->config.heads;
  return View<float, 3>::dense(room<float>(mass_, rows * heads * mass_room(tokens)), {rows, heads, tokens});
}

ops::LateMass* CudaExecutor::wait_with_mass(std::int64_t rows, const View<float, 3>& mass,
                                            const ops::MassColumn& into) {
  const Shape& s = store_.shape();
  if (!into.may_wait || room_ == 0 || batch_invariant_ || s.page_size % ops::ShareLayout::tokens) return nullptr;
  const std::int64_t tokens = mass.extent[2], all = late_bytes(s, rows, tokens);
  if (all > most_late_mass) return nullptr;
  ops::LateMass next;
  next.room = room<std::byte>(late_room_, all) + std::ssize(late_) * (all / s.layers);
  next.tokens = static_cast<int>(tokens);
  return &late_.emplace_back(next);
}

void CudaExecutor::write_late() {
  if (late_.empty()) return;
  const PartTimer timer(Part::attend);
  const std::vector<ops::LateMass> all = std::exchange(late_, {});
  only_on_cuda<ops::add_late_mass>(all, stream_);
}

View<const float, 3> CudaExecutor::attend(int layer, const std::vector<std::int32_t>& slots, const Selection& read,
                                          const View<float, 3>& mass, ops::MassColumn mass_into) {
  const ModelConfig& c = model_->config;
  const PagedKv kv = store_.view(layer, slots);
  const bool rounded = rounds(kv);
  if (!read.pages && !read.tokens) store_.note_absent(layer, slots);
  if (read.made_up) room<float>(lse_, kv.rows * c.heads);
  ops::LateMass* const late = wait_with_mass(kv.rows, mass, mass_into);
  batch_invariant_ ? attend_each(kv, read, mass, mass_into)
                   : attend_rows(kv, 0, read, mass, mass_into, nullptr, false, late);
  if (late && !late->left) late_.pop_back();
  attended_ = rounded ? &rounded_ : &attention_;
  attended_type_ = rounded ? weights_.dtype : DType::f32;
  return View<const float, 3>::dense(attention_.as<float>(), {kv.rows, c.heads, c.head_dim});
}

void CudaExecutor::fill_left_out(int layer, const std::vector<std::int32_t>& slots, const LeftOut& what) {
  const PartTimer timer(Part::attend);
  const ModelConfig& c = model_->config;
  const PagedKv kv = store_.view(layer, slots);
  ops::blend_left_out(kv, what, View<float, 3>::dense(attention_.as<float>(), {kv.rows, c.heads, c.head_dim}),
                      rounds(kv) ? rounded_.as<>() : nullptr, stream_);
}

void CudaExecutor::prompt_logits(std::int64_t rows, const View<float, 2>& of_last) {
  const std::int64_t wanted = of_last ? of_last.extent[0] : 0;
  for (std::int64_t at = 0; at < wanted; at += row_block) {
    const std::int64_t count = std::min(row_block, wanted - at);
    logits_of_rows(rows - wanted + at, count);
    View<float, 2> block = of_last;
    block.data += at * of_last.stride[0];
    logits_of(count, block);
  }
  note_prompt(of_last);
}

void CudaExecutor::head(std::int64_t rows, const StepResult&) {
  struct RoomForChecks {
    const CudaStore& store;
    explicit RoomForChecks(const CudaStore& s) : store(s) { store.leave_room_to_checks(true); }
    ~RoomForChecks() { store.leave_room_to_checks(false); }
  } const until_the_end(store_);
  logits_of_rows(0, rows);
  const PartTimer timer(Part::other);
  ops::ArgmaxArgs a;
  a.x = logits_.as<float>();
  a.rows = rows;
  a.n = a.x_stride = weights_.head.n;
  a.index = room<std::int32_t>(likeliest_, rows);
  a.nonfinite = nonfinite_.as<std::int32_t>();
  ops::argmax(a, stream_);
}

void CudaExecutor::read(std::int64_t rows, const StepResult& out) {
  if (!out.logits && out.likeliest.empty()) return;
  std::vector<std::int32_t> likeliest(static_cast<std::size_t>(rows));
  copy_memory(likeliest.data(), likeliest_.as<>(), likeliest.size() * sizeof(std::int32_t), stream_);
  if (out.logits) logits_of(rows, out.logits);
  synchronize(stream_);
  for (std::size_t r = 0; r < likeliest.size(); ++r)
    if (likeliest[r] < 0) nonfinite_rows_.push_back(static_cast<std::int32_t>(r));
  std::copy_n(likeliest.begin(), out.likeliest.size(), out.likeliest.begin());
}

CudaExecutor::State CudaExecutor::state() const {
  return {require_cuda("the executor on CUDA").runtime.scratch_moves(), grown_, store_.workspace_moves(),
          store_.tails_below(), PartClock::thread_events() != nullptr};
}

int CudaExecutor::room(int layer, const std::vector<std::int32_t>& slots) const {
  return room_ > 0 ? room_ : store_.max_length(layer, slots);
}

// Lengths change while a graph is launched again, so its arrays have spare room. Where the heads outgrow it, or have
// become much shorter, the graph is captured anew.
void CudaExecutor::make_room(Replay& r, const std::vector<std::int32_t>& slots) const {
  int longest = 0;
  for (int l = 0; l < store_.shape().layers; ++l) longest = std::max(longest, store_.max_length(l, slots));
  const int most = store_.shape().max_tokens, needed = std::min(longest + 1, most);
  if (needed <= r.room && r.room <= 4 * needed + 4096) return;
  const int spare = std::max(512, needed / 8);
  r.graph = {};  // before its marks
  r = Replay{};
  r.room = std::min(most, (needed / spare + 2) * spare);
}

// Runs the step as one launch of its graph. Returns false if the step must run without one to allocate its buffers.
bool CudaExecutor::replay(const std::vector<std::int32_t>& slots, LayerHooks& hooks, const StepResult& out) {
  Replay& r = replay_of(slots);
  const State now = state();
  const bool known = r.graph && r.captured == now;
  if (!known && r.warm != now) return false;
  if (!store_.reserve_step(slots, r.taken)) return false;
  store_.view(0, slots);  // copies the slots to the place that the graph reads
  PartEvents* parts = PartClock::thread_events();
  if (!known) {
    r.graph = {};  // before its marks
    r.marks = parts ? std::make_shared<PartMarks>() : nullptr;
    r.graph = CudaGraph(stream_, [&] {
      std::optional<MarksInGraph> marked;
      if (parts) marked.emplace(*parts, *r.marks);
      store_.count_edits_anew();
      store_.reserved(true);
      run_layers(slots, hooks, out);
    });
    r.captured = now;
  }
  watch_.begin(stream_);
  r.graph.launch(stream_);
  watch_.end(stream_);
  if (parts) parts->launched(r.marks);
  ++replayed_;
  return true;
}

Fit CudaExecutor::run(const std::vector<std::int32_t>& slots, LayerHooks& hooks, const StepResult& out) {
  const auto n = static_cast<std::int64_t>(slots.size());
  const bool replayable = hooks.replayable() && n <= row_block;
  struct InGraph {
    CudaStore& store;
    ~InGraph() {
      store.in_graph(false);
      store.reserved(false);
    }
  } const until_the_end{store_};
  late_.clear();  // of a step that an error ended
  const LateStateScope scope(*this);
  store_.in_graph(replayable);
  store_.taken_by_edits();
  keeps_rows_ = replayable && hooks.keeps_rows();
  if (keeps_rows_) room<float>(qkv_, model_->config.layers * n * qkv_width());
  room_ = 0;
  if (replayable) {
    store_.make_way(slots);
    make_room(replay_of(slots), slots);
    room_ = replay_of(slots).room;
  }
  store_.leave_room(slots, hooks.keeps_rows());
  if (replayable && replay(slots, hooks, out)) return Fit::ok;
  watch_.begin(stream_);
  if (const Fit fit = run_layers(slots, hooks, out); fit != Fit::ok) return fit;
  watch_.end(stream_);
  if (replayable) replay_of(slots).warm = state(), replay_of(slots).taken = store_.taken_by_edits();
  return Fit::ok;
}

}  // namespace kvlab
