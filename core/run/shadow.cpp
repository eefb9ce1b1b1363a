#include "run/shadow.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/backend.hpp"
#include "base/finite.hpp"
#include "ops/attend/attend.hpp"
#include "ops/page/paged.hpp"
#include "store/cpu_store.hpp"
#include "store/cuda_store.hpp"

namespace kvlab {
namespace {

StoreOptions shadow_options(const Model& model, int page_size, int max_tokens) {
  StoreOptions o;
  o.shape.layers = model.config.layers;
  o.shape.query_heads = model.config.heads;
  o.shape.kv_heads = model.config.kv_heads;
  o.shape.head_dim = model.config.head_dim;
  o.shape.page_size = page_size;
  o.shape.max_slots = 1;
  o.shape.max_tokens = max_tokens;
  o.shape.dtype = model.dtype == DType::f16 ? DType::f32 : model.dtype;  // the CPU's attention knows no f16
  o.rope_table = model.rope();
  return o;
}

void want_room(Fit fit) {
  if (fit != Fit::ok) throw NoRoom("got no memory for a copy of the whole cache, with which fidelity compares");
}

std::unique_ptr<Store> new_store(StoreOptions o, const Store* beside) {
  if (beside && beside->stream().device() == Device::cuda && beside->options().rope == RopeRegime::original) {
    StoreOptions there = o;
    there.shape.dtype = beside->shape().dtype;
    const Shape& s = there.shape;
    const std::int64_t frames = std::int64_t{s.layers} * s.kv_heads * s.max_pages(),
                       bytes = frames * store_bytes(there, Device::cuda).frame;
    const auto room = static_cast<std::int64_t>(require_cuda("fidelity").runtime.free_bytes());
    // The full cache's run needs as much while this copy is there, and scratch beside it.
    if (bytes <= room / 3) return make_store(there, beside->stream());
  }
  return make_store(o, Stream::cpu());
}

// Sets the flags in `seen` [total] of the text positions that one KV head's attention read.
void attended_positions(const DecodeLayer& l, const Store& store, int head, int window, std::vector<char>& seen) {
  const int slot = (*l.slots)[0], newest = store.position(slot), p = store.shape().page_size;
  const std::vector<std::int32_t> position = store.positions_by_place(l.layer, slot, head);
  const int n = static_cast<int>(position.size());
  const auto see = [&](int begin, int end) {
    for (int t = begin; t < std::min(n, end); ++t)
      if (const std::int32_t at = position[static_cast<std::size_t>(t)]; window == 0 || at > newest - window)
        seen[static_cast<std::size_t>(at)] = 1;
  };
  const PageList* pages = l.read.pages;
  const TokenList* tokens = l.read.tokens;
  if (!pages && !tokens) see(0, n);
  for (int i = 0; pages && i < pages->count(0, head); ++i)
    see(pages->index(0, head, i) * p, (pages->index(0, head, i) + 1) * p);
  for (int i = 0; tokens && i < tokens->count(0, head); ++i)
    see(tokens->index(0, head, i), tokens->index(0, head, i) + 1);
}

}  // namespace

Shadow::Shadow(const Model& model, int page_size, int max_tokens, const Store* beside)
    : model_(model), store_(new_store(shadow_options(model, page_size, max_tokens), beside)) {
  store_->open();
}

void Shadow::reset() {
  store_->close(0);
  store_->open();
  rows_ = {};
  skipped_ = 0;
}

// In the original regime the vectors are already rotated by text position. Otherwise this rotates the raw ones.
const float* Shadow::original(const View<const float, 3>& rotated, const View<const float, 3>& raw, int first,
                              std::vector<float>& buffer) const {
  if (!raw) return rotated.data;
  const std::int64_t n = raw.extent[0], heads = raw.extent[1], dim = raw.extent[2];
  buffer.assign(raw.data, raw.data + n * heads * dim);
  std::vector<float> angle(static_cast<std::size_t>(dim));
  for (std::int64_t t = 0; t < n; ++t) {
    ops::rope_angles(model_.rope(), static_cast<double>(first + t), angle.data(), angle.data() + dim / 2);
    for (std::int64_t h = 0; h < heads; ++h)
      ops::rotate_with(buffer.data() + (t * heads + h) * dim, angle.data(), angle.data() + dim / 2,
                       static_cast<int>(dim));
  }
  return buffer.data();
}

// The rows' keys and values lie in memory of the copy's device. The first one's text position is `first`.
void Shadow::append(const LayerRows& l, int first) {
  const int n = static_cast<int>(l.keys.extent[0]);
  if (CudaStore* there = store_->cuda()) {
    want_room(there->append(l.layer, 0, l.keys.data, l.values.data, DType::f32, l.keys.stride[0], n, first));
  } else {
    const float* k = original(l.keys, l.raw_keys, first, keys_);
    want_room(store_->cpu()->append(l.layer, 0, k, l.values.data, n, first));
  }
}

void Shadow::prompt(const PromptLayer& l, const Store& store) {
  append(l, store.position(l.slot));
  if (l.layer + 1 == model_.config.layers) store_->advance(0, static_cast<int>(l.keys.extent[0]), false);
}

void Shadow::attend_to_all(int layer, const float* queries, int newest) {
  const ModelConfig& c = model_.config;
  const int total = newest + 1;
  const auto width = static_cast<std::size_t>(c.heads * c.head_dim),
             mass = static_cast<std::size_t>(c.heads) * static_cast<std::size_t>(total);
  output_.resize(width);
  mass_.resize(mass);
  const auto attend = [&](const float* q, float* out, float* to, const std::int32_t* last) {
    ops::AttendArgs a;
    a.kv = store_->view(layer, slots_);
    a.queries = View<const float, 3>::dense(q, {1, c.heads, c.head_dim});
    a.softmax_scale = 1.f / std::sqrt(static_cast<float>(c.head_dim));
    a.window = c.sliding_window;
    a.last = last;
    a.out = View<float, 3>::dense(out, {1, c.heads, c.head_dim});
    a.mass = View<float, 3>::dense(to, {1, c.heads, total});
    ops::attend(a, store_->workspace(), store_->stream());
    store_->workspace().reset();
  };
  if (!store_->cuda()) return attend(queries, output_.data(), mass_.data(), &newest);
  const Stream s = store_->stream();
  const std::size_t most = static_cast<std::size_t>(c.heads) * static_cast<std::size_t>(store_->shape().max_tokens);
  if (!step_) step_ = StreamMemory(s, (width + most + 1) * sizeof(float));
  float *const out = step_.as<float>(), *const to = out + width;
  auto* const last = reinterpret_cast<std::int32_t*>(to + most);
  copy_memory(last, &newest, sizeof newest, s);
  attend(queries, out, to, last);
  copy_memory(output_.data(), out, width * sizeof *out, s);
  copy_memory(mass_.data(), to, mass * sizeof *to, s);
  synchronize(s);
}

void Shadow::attended(const DecodeLayer& l, const Store& store) {
  const int newest = store.position((*l.slots)[0]);
  append(l, newest);
  const bool compared = skipped_ == 0, last = l.layer + 1 == model_.config.layers;
  if (compared)
    attend_to_all(l.layer, store_->cuda() ? l.queries.data : original(l.queries, l.raw_queries, newest, queries_),
                  newest);
  if (last) store_->advance(0, 1, true);
  if (compared)
    compare_step(store_->cuda() ? read_part(l, store.stream()) : l, store, newest + 1);
  else if (last)
    --skipped_;
}

// A copy on the host of what compare_step reads: the output, and the list that attention read.
DecodeLayer Shadow::read_part(DecodeLayer l, Stream s) {
  l.queries = l.raw_queries = l.keys = l.raw_keys = l.values = {};
  l.mass = {};
  return copy_.of(l, s);
}

void Shadow::compare_step(const DecodeLayer& l, const Store& store, int total) {
  const ModelConfig& c = model_.config;
  if (!finite(l.layer, l.output.data)) {
    constexpr double nan = std::numeric_limits<double>::quiet_NaN();
    return add(nan, nan, nan);
  }

  const int p = store_->shape().page_size;
  const auto tokens = static_cast<std::size_t>(total), pages = static_cast<std::size_t>((total + p - 1) / p);
  heads_.resize(static_cast<std::size_t>(c.kv_heads));
  for (std::size_t h = 0; h < heads_.size(); ++h) {
    Head& head = heads_[h];
    head.seen.assign(tokens, 0);
    attended_positions(l, store, static_cast<int>(h), c.sliding_window, head.seen);
    head.page_mass.assign(pages, 0);
    head.chosen.assign(pages, 0);
    head.order.resize(pages);
  }
#pragma omp parallel for schedule(static)
  for (std::size_t h = 0; h < heads_.size(); ++h)
    compare(heads_[h], mass_.data() + h * static_cast<std::size_t>(c.group()) * tokens, c.group(), p);
  double missed = 0, recall = 0;
  for (const Head& head : heads_) missed += head.missed, recall += head.recall;
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < output_.size(); ++i) {
    const double full = output_[i], ours = l.output.data[i];
    difference += (ours - full) * (ours - full);
    norm += full * full;
  }
  add(1 - missed / c.heads, recall / c.kv_heads, difference > 0 ? std::sqrt(difference / norm) : 0);
}

// mass [query head of the group, token] of full attention.
void Shadow::compare(Head& head, const float* mass, int group, int page_size) {
  const std::size_t tokens = head.seen.size(), pages = head.chosen.size(), p = static_cast<std::size_t>(page_size);
  head.missed = 0;
  for (int g = 0; g < group; ++g, mass += tokens)
    for (std::size_t page = 0; page < pages; ++page) {
      double all = 0, missed = 0;
      for (std::size_t t = page * p; t < std::min(tokens, (page + 1) * p); ++t) {
        all += mass[t];
        missed += head.seen[t] ? 0.f : mass[t];
      }
      head.page_mass[page] += all;
      head.missed += missed;
    }
  for (std::size_t t = 0; t < tokens; ++t) head.chosen[t / p] |= head.seen[t];
  const auto count = std::count(head.chosen.begin(), head.chosen.end(), 1);
  std::iota(head.order.begin(), head.order.end(), 0);
  const auto end = head.order.begin() + count;
  std::nth_element(head.order.begin(), end, head.order.end(), [&](std::size_t x, std::size_t y) {
    return head.page_mass[x] != head.page_mass[y] ? head.page_mass[x] > head.page_mass[y] : x < y;
  });
  const auto hit = std::count_if(head.order.begin(), end, [&](std::size_t page) { return head.chosen[page] != 0; });
  head.recall = count ? static_cast<double>(hit) / static_cast<double>(count) : 0;
}

bool Shadow::finite(int layer, const float* ours) {
  const auto width = static_cast<std::int64_t>(output_.size());
  const std::int64_t found = count_nonfinite(mass_.data(), static_cast<std::int64_t>(mass_.size())) +
                             count_nonfinite(output_.data(), width) + count_nonfinite(ours, width);
  if (found > 0 && rows_.layer < 0) rows_.layer = layer;
  rows_.nonfinite += found;
  return found == 0;
}

void Shadow::add(double mass, double page_recall, double output_error) {
  rows_.mass.push_back(static_cast<float>(mass));
  rows_.page_recall.push_back(static_cast<float>(page_recall));
  rows_.output_error.push_back(static_cast<float>(output_error));
}

Shadow::Rows Shadow::take() {
  Rows out;
  std::swap(out, rows_);
  return out;
}

}  // namespace kvlab
