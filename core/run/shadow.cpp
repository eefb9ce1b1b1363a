#include "run/shadow.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/backend.hpp"
#include "base/finite.hpp"
#include "ops/attend/attend.hpp"
#include "ops/attend/unread_mass.hpp"
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

}  // namespace

Shadow::Shadow(const Model& model, int page_size, int max_tokens, const Store* beside, bool on_host)
    : model_(model),
      store_(new_store(shadow_options(model, page_size, max_tokens), on_host ? nullptr : beside)),
      in_place_(beside && beside->stream().device() == Device::cuda),
      scratch_(ledger_, in_place_ ? beside->stream() : Stream::cpu()) {
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

// A step's figures of one layer, one after the other in memory of the policy's device.
struct Shadow::Layout {
  std::int64_t heads, pages, width;
  std::int64_t nonfinite() const { return heads * pages * 2 * 8; }  // after the sums
  std::int64_t read() const { return nonfinite() + (heads + 1) / 2 * 8; }
  std::int64_t full() const { return read() + (heads * pages + 1) / 2 * 8; }
  std::int64_t ours() const { return full() + width * 4; }
  std::int64_t bytes() const { return (ours() + width * 4 + 7) / 8 * 8; }
};

Shadow::Layout Shadow::layout(int total) const {
  const ModelConfig& c = model_.config;
  const int p = store_->shape().page_size;
  return {c.kv_heads, (total + p - 1) / p, std::int64_t{c.heads} * c.head_dim};
}

// Sets mass_ and output_, which lie in memory of the copy's device.
void Shadow::attend_to_all(int layer, const float* queries, int newest) {
  const ModelConfig& c = model_.config;
  const Stream s = store_->stream();
  const auto width = static_cast<std::size_t>(c.heads * c.head_dim),
             most = static_cast<std::size_t>(c.heads) * static_cast<std::size_t>(store_->shape().max_tokens);
  if (!step_) step_ = StreamMemory(s, (width + most + 1) * sizeof(float));
  output_ = step_.as<float>();
  mass_ = output_ + width;
  auto* const last = reinterpret_cast<std::int32_t*>(mass_ + most);
  copy_memory(last, &newest, sizeof newest, s);
  ops::AttendArgs a;
  a.kv = store_->view(layer, slots_);
  a.queries = View<const float, 3>::dense(queries, {1, c.heads, c.head_dim});
  a.softmax_scale = 1.f / std::sqrt(static_cast<float>(c.head_dim));
  a.window = c.sliding_window;
  a.last = last;
  a.out = View<float, 3>::dense(output_, {1, c.heads, c.head_dim});
  a.mass = View<float, 3>::dense(mass_, {1, c.heads, newest + 1});
  ops::attend(a, store_->workspace(), s);
  store_->workspace().reset();
}

void Shadow::attended(const DecodeLayer& l, const Store& store) {
  const int newest = store.position((*l.slots)[0]);
  const bool there = store.stream().device() == Device::cuda, compared = skipped_ == 0,
             last = l.layer + 1 == model_.config.layers;
  if (there && !in_place_)
    throw Error(Errc::internal, "fidelity got a step of a GPU, wanted its store beside the copy");
  const DecodeLayer& rows = there && !store_->cuda() ? copied_rows(l, store.stream()) : l;
  append(rows, newest);
  if (compared) {
    attend_to_all(l.layer,
                  store_->cuda() ? rows.queries.data : original(rows.queries, rows.raw_queries, newest, queries_),
                  newest);
    note_layer(l, store, newest + 1);
  }
  if (last) store_->advance(0, 1, true);
  if (compared && last) compare_step(newest + 1, store.stream());
  if (!compared && last) --skipped_;
}

// What the copy on the host takes of a step of a GPU.
const DecodeLayer& Shadow::copied_rows(DecodeLayer l, Stream s) {
  l.output = {}, l.mass = {};
  l.read = {};
  return here_ = copy_.of(l, s);
}

// Leaves the layer's figures in figures_. Nothing waits for the policy's device.
void Shadow::note_layer(const DecodeLayer& l, const Store& store, int total) {
  const ModelConfig& c = model_.config;
  const Stream s = store.stream();
  const Layout at = layout(total);
  const auto most = static_cast<std::size_t>(layout(store_->shape().max_tokens).bytes() * c.layers);
  if (!figures_) figures_ = StreamMemory(s, most);
  std::byte* const to = figures_.as<>() + at.bytes() * l.layer;
  const float* mass = mass_;
  const auto width = static_cast<std::size_t>(at.width) * sizeof(float);
  if (s.device() != store_->stream().device()) {
    const auto bytes = static_cast<std::size_t>(c.heads) * static_cast<std::size_t>(total) * sizeof(float);
    if (!mass_there_) mass_there_ = StreamMemory(s, static_cast<std::size_t>(c.heads * store_->shape().max_tokens) * 4);
    copy_memory(mass_there_.as<>(), mass_, bytes, s);
    mass = mass_there_.as<float>();
  }
  ops::UnreadMass a;
  a.kv = store.view(l.layer, *l.slots);
  a.pages = l.read.pages;
  a.tokens = l.read.tokens;
  a.mass = View<const float, 2>::dense(mass, {c.heads, total});
  a.window = c.sliding_window;
  a.page = store_->shape().page_size;
  a.sums = View<double, 3>::dense(reinterpret_cast<double*>(to), {at.heads, at.pages, 2});
  a.nonfinite = View<std::int32_t, 1>::dense(reinterpret_cast<std::int32_t*>(to + at.nonfinite()), {at.heads});
  a.read = View<std::int32_t, 2>::dense(reinterpret_cast<std::int32_t*>(to + at.read()), {at.heads, at.pages});
  ops::unread_mass(a, scratch_, s);
  scratch_.reset();
  copy_memory(to + at.full(), output_, width, s);
  copy_memory(to + at.ours(), l.output.data, width, s);
}

void Shadow::compare_step(int total, Stream s) {
  const ModelConfig& c = model_.config;
  const Layout at = layout(total);
  const auto bytes = static_cast<std::size_t>(at.bytes() * c.layers);
  host_.resize(bytes);
  copy_memory(host_.data(), figures_.as<>(), bytes, s);
  synchronize(s);
  compared_.assign(static_cast<std::size_t>(c.layers), {});
#pragma omp parallel for schedule(static)
  for (int layer = 0; layer < c.layers; ++layer)
    compared_[static_cast<std::size_t>(layer)] = compare(host_.data() + at.bytes() * layer, at);
  for (int layer = 0; layer < c.layers; ++layer) {
    const Compared& x = compared_[static_cast<std::size_t>(layer)];
    if (x.nonfinite > 0 && rows_.layer < 0) rows_.layer = layer;
    rows_.nonfinite += x.nonfinite;
    rows_.mass.push_back(static_cast<float>(1 - x.missed / c.heads));
    rows_.page_recall.push_back(static_cast<float>(x.recall / c.kv_heads));
    rows_.output_error.push_back(static_cast<float>(x.output_error));
  }
}

// The figures of one layer.
Shadow::Compared Shadow::compare(const std::byte* from, const Layout& at) const {
  const auto* const sums = reinterpret_cast<const double*>(from);
  const auto* const nonfinite = reinterpret_cast<const std::int32_t*>(from + at.nonfinite());
  const auto* const read = reinterpret_cast<const std::int32_t*>(from + at.read());
  const auto* const full = reinterpret_cast<const float*>(from + at.full());
  const auto* const ours = reinterpret_cast<const float*>(from + at.ours());
  Compared out;
  out.nonfinite = std::accumulate(nonfinite, nonfinite + at.heads, std::int64_t{0}) + count_nonfinite(full, at.width) +
                  count_nonfinite(ours, at.width);
  if (out.nonfinite > 0) {
    out.missed = out.recall = out.output_error = std::numeric_limits<double>::quiet_NaN();
    return out;
  }
  for (std::int64_t h = 0; h < at.heads; ++h) {
    const double* const mass = sums + h * at.pages * 2;
    for (std::int64_t p = 0; p < at.pages; ++p) out.missed += mass[2 * p + 1];
    out.recall += recall(mass, read + h * at.pages, at.pages);
  }
  double difference = 0, norm = 0;
  for (std::int64_t i = 0; i < at.width; ++i) {
    const double of_full = full[i], of_ours = ours[i];
    difference += (of_ours - of_full) * (of_ours - of_full);
    norm += of_full * of_full;
  }
  out.output_error = difference > 0 ? std::sqrt(difference / norm) : 0;
  return out;
}

// The share of the pages that were read among as many pages of the largest mass. mass: [page, 2].
double Shadow::recall(const double* mass, const std::int32_t* read, std::int64_t pages) {
  const auto count = std::count(read, read + pages, 1);
  if (count == 0) return 0;
  std::vector<std::int64_t> order(static_cast<std::size_t>(pages));
  std::iota(order.begin(), order.end(), 0);
  const auto end = order.begin() + count;
  std::nth_element(order.begin(), end, order.end(), [&](std::int64_t x, std::int64_t y) {
    return mass[2 * x] != mass[2 * y] ? mass[2 * x] > mass[2 * y] : x < y;
  });
  const auto hit = std::count_if(order.begin(), end, [&](std::int64_t page) { return read[page] != 0; });
  return static_cast<double>(hit) / static_cast<double>(count);
}

Shadow::Rows Shadow::take() {
  Rows out;
  std::swap(out, rows_);
  return out;
}

}  // namespace kvlab
