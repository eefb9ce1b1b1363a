#include "run/shadow.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "base/backend.hpp"
#include "base/finite.hpp"
#include "base/over_rows.hpp"
#include "ops/attend/attend.hpp"
#include "ops/attend/unread_mass.hpp"
#include "ops/page/paged.hpp"
#include "store/cpu_store.hpp"
#include "store/cuda_store.hpp"

namespace kvlab {
namespace {

StoreOptions shadow_options(const Model& model, int page_size, int max_tokens, int slots) {
  StoreOptions o;
  o.shape.layers = model.config.layers;
  o.shape.query_heads = model.config.heads;
  o.shape.kv_heads = model.config.kv_heads;
  o.shape.head_dim = model.config.head_dim;
  o.shape.page_size = page_size;
  o.shape.max_slots = slots;
  o.shape.max_tokens = max_tokens;
  o.shape.dtype = model.dtype == DType::f16 ? DType::f32 : model.dtype;  // the CPU's attention knows no f16
  o.rope_table = model.rope();
  return o;
}

void want_room(Fit fit) {
  if (fit != Fit::ok) throw NoRoom("got no memory for a copy of the whole cache, with which fidelity compares");
}

// Bytes of a GPU's pages of one whole sequence.
std::int64_t sequence_bytes(const StoreOptions& o) {
  const Shape& s = o.shape;
  return std::int64_t{s.layers} * s.kv_heads * s.max_pages() * store_bytes(o, Device::cuda).frame;
}

std::int64_t free_bytes() { return static_cast<std::int64_t>(require_cuda("fidelity").runtime.free_bytes()); }

std::unique_ptr<Store> new_store(StoreOptions o, const Store* beside) {
  if (beside && beside->stream().device() == Device::cuda && beside->options().rope == RopeRegime::original) {
    StoreOptions there = o;
    there.shape.dtype = beside->shape().dtype;
    // The full cache's run needs as much while this copy is there, and scratch beside it.
    if (sequence_bytes(there) * o.shape.max_slots <= free_bytes() / 3) return make_store(there, beside->stream());
  }
  return make_store(o, Stream::cpu());
}

}  // namespace

Shadow::Shadow(const Model& model, int page_size, int max_tokens, Where where)
    : model_(model),
      store_(
          new_store(shadow_options(model, page_size, max_tokens, where.slots), where.on_host ? nullptr : where.beside)),
      in_place_(where.beside && where.beside->stream().device() == Device::cuda),
      scratch_(ledger_, in_place_ ? where.beside->stream() : Stream::cpu()),
      slots_(static_cast<std::size_t>(where.slots)) {
  for (int slot = 0; slot < where.slots; ++slot) store_->open();
}

int Shadow::most_slots(const Model& model, int page_size, int max_tokens, int want) {
  StoreOptions o = shadow_options(model, page_size, max_tokens, 1);
  o.shape.dtype = model.dtype;
  const std::int64_t fit = free_bytes() / std::max<std::int64_t>(1, sequence_bytes(o)) / 4;
  return static_cast<int>(std::clamp<std::int64_t>(fit, 1, std::max(1, want)));
}

void Shadow::reset(int slot) {
  store_->close(slot);
  store_->open();  // the others are open
  slots_[static_cast<std::size_t>(slot)] = {};
  known_ = nullptr, noted_ = nullptr, compared_steps_ = 0;
}

const FullAttention::Layer& Shadow::known(int layer) const {
  return known_->at(compared_steps_ * static_cast<std::size_t>(model_.config.layers) + static_cast<std::size_t>(layer));
}

// A row's vectors as its text position rotates them.
void Shadow::rotate(const View<const float, 3>& raw, int row, int position, float* to) const {
  const std::int64_t heads = raw.extent[1], dim = raw.extent[2];
  std::copy_n(&raw(row, 0, 0), heads * dim, to);
  std::vector<float> angle(static_cast<std::size_t>(dim));
  ops::rope_angles(model_.rope(), position, angle.data(), angle.data() + dim / 2);
  for (std::int64_t h = 0; h < heads; ++h)
    ops::rotate_with(to + h * dim, angle.data(), angle.data() + dim / 2, static_cast<int>(dim));
}

// Keys and values of the rows [row, row + rows), in memory of the copy's device. The first one's text position is
// `first`. In the original regime keys are already rotated by text position. Otherwise this rotates the raw ones.
void Shadow::append(const LayerRows& l, int slot, int row, int rows, int first) {
  const float *keys = l.keys.data + row * l.keys.stride[0], *values = l.values.data + row * l.values.stride[0];
  if (CudaStore* there = store_->cuda())
    return want_room(there->append(l.layer, slot, keys, values, DType::f32, l.keys.stride[0], rows, first));
  if (l.raw_keys) {
    const std::int64_t width = l.raw_keys.extent[1] * l.raw_keys.extent[2];
    keys_.resize(static_cast<std::size_t>(rows * width));
    for (int r = 0; r < rows; ++r) rotate(l.raw_keys, row + r, first + r, keys_.data() + r * width);
    keys = keys_.data();
  }
  want_room(store_->cpu()->append(l.layer, slot, keys, values, rows, first));
}

void Shadow::prompt(const PromptLayer& l, const Store& store) {
  if (known_) return;
  const int tokens = static_cast<int>(l.keys.extent[0]);
  append(l, l.slot, 0, tokens, store.position(l.slot));
  if (l.layer + 1 == model_.config.layers) store_->advance(l.slot, tokens, false);
}

// A step's figures of one layer, one after the other in memory of the policy's device. Pages are as many as the longest
// row has.
struct Shadow::Layout {
  std::int64_t rows, heads, pages, width;
  std::int64_t nonfinite() const { return rows * heads * pages * 2 * 8; }  // after the sums
  std::int64_t read() const { return nonfinite() + rows * heads * 4; }
  std::int64_t full() const { return read() + rows * heads * pages * 4; }
  std::int64_t ours() const { return full() + rows * width * 4; }
  std::int64_t bytes() const { return (ours() + rows * width * 4 + 7) / 8 * 8; }
};

Shadow::Layout Shadow::layout(int rows, int total) const {
  const ModelConfig& c = model_.config;
  const int p = store_->shape().page_size;
  return {rows, c.kv_heads, (total + p - 1) / p, std::int64_t{c.heads} * c.head_dim};
}

// Sets mass_ and output_. They lie in memory of the copy's device, behind the rows' newest positions, or are known.
void Shadow::attend_to_all(const LayerRows& l) {
  const ModelConfig& c = model_.config;
  const Stream s = store_->stream();
  if (known_) {
    output_ = known(l.layer).output.data(), mass_ = known(l.layer).mass.data();
    return;
  }
  const auto rows = static_cast<std::int64_t>(of_rows_.size()), width = std::int64_t{c.heads} * c.head_dim;
  const auto slots = static_cast<std::int64_t>(slots_.size()),
             positions = (slots + 31) / 32 * 32;  // output_ is aligned
  if (!step_) {
    const std::int64_t most = positions + slots * (width + std::int64_t{c.heads} * store_->shape().max_tokens);
    step_ = StreamMemory(s, static_cast<std::size_t>(most) * sizeof(float));
  }
  auto* const last = step_.as<std::int32_t>();
  float* const output = step_.as<float>() + positions;
  float* const mass = output + slots * width;
  output_ = output, mass_ = mass;
  copy_memory(last, newest_.data(), newest_.size() * sizeof newest_[0], s);
  ops::AttendArgs a;
  a.kv = store_->view(l.layer, of_rows_);
  a.queries = l.queries;
  if (!store_->cuda() && l.raw_queries) {
    queries_.resize(static_cast<std::size_t>(rows * width));
    for (int r = 0; r < rows; ++r)
      rotate(l.raw_queries, r, newest_[static_cast<std::size_t>(r)], queries_.data() + r * width);
    a.queries = View<const float, 3>::dense(queries_.data(), l.queries.extent);
  }
  a.softmax_scale = 1.f / std::sqrt(static_cast<float>(c.head_dim));
  a.window = c.sliding_window;
  a.last = last;
  a.out = View<float, 3>::dense(output, {rows, c.heads, c.head_dim});
  a.mass = View<float, 3>::dense(mass, {rows, c.heads, total_});
  ops::attend(a, store_->workspace(), s);
  store_->workspace().reset();
}

void Shadow::attended(const DecodeLayer& l, const Store& store) {
  const bool there = store.stream().device() == Device::cuda, last = l.layer + 1 == model_.config.layers;
  if (there && !in_place_)
    throw Error(Errc::internal, "fidelity got a step of a GPU, wanted its store beside the copy");
  if (l.layer == 0) {
    of_rows_ = *l.slots;
    newest_.clear();
    for (const std::int32_t slot : of_rows_) newest_.push_back(store.position(slot));
    total_ = *std::max_element(newest_.begin(), newest_.end()) + 1;
  }
  LayerRows rows = l;
  if (there && !store_->cuda()) {
    DecodeLayer wanted = l;
    wanted.output = {}, wanted.mass = {}, wanted.read = {};
    rows = copy_.of(wanted, store.stream());
  }
  for (std::size_t r = 0; !known_ && r < of_rows_.size(); ++r)
    append(rows, of_rows_[r], static_cast<int>(r), 1, newest_[r]);
  const auto skipped = [&](std::int32_t slot) -> int& { return slots_[static_cast<std::size_t>(slot)].skipped; };
  const bool compared = std::ranges::any_of(of_rows_, [&](std::int32_t slot) { return skipped(slot) == 0; });
  if (compared) {
    attend_to_all(rows);
    note_layer(l, store);
  }
  if (!last) return;
  for (const std::int32_t slot : of_rows_)
    if (!known_) store_->advance(slot, 1, true);
  if (compared) compare_step(store.stream());
  for (const std::int32_t slot : of_rows_) skipped(slot) -= skipped(slot) > 0;
}

// Leaves the layer's figures in figures_. Nothing waits for the policy's device.
void Shadow::note_layer(const DecodeLayer& l, const Store& store) {
  const ModelConfig& c = model_.config;
  const Stream s = store.stream();
  const Layout at = layout(static_cast<int>(of_rows_.size()), total_);
  if (!figures_) {
    const Layout most = layout(static_cast<int>(slots_.size()), store_->shape().max_tokens);
    figures_ = StreamMemory(s, static_cast<std::size_t>(most.bytes() * c.layers));
  }
  std::byte* const to = figures_.as<>() + at.bytes() * l.layer;
  const auto* last = known_ ? newest_.data() : step_.as<std::int32_t>();
  const float* mass = mass_;
  if (s.device() != store_->stream().device()) {
    if (!there_) there_ = StreamMemory(s, step_.bytes());
    const auto used = static_cast<std::size_t>(mass_ - step_.as<float>() + at.rows * c.heads * total_);
    copy_memory(there_.as<>(), step_.as<>(), used * sizeof(float), s);
    last = there_.as<std::int32_t>();
    mass = there_.as<float>() + (mass_ - step_.as<float>());
  }
  ops::UnreadMass a;
  a.kv = store.view(l.layer, *l.slots);
  a.pages = l.read.pages;
  a.tokens = l.read.tokens;
  a.mass = View<const float, 3>::dense(mass, {at.rows, c.heads, total_});
  a.last = last;
  a.window = c.sliding_window;
  a.page = store_->shape().page_size;
  a.sums = View<double, 4>::dense(reinterpret_cast<double*>(to), {at.rows, at.heads, at.pages, 2});
  a.nonfinite = View<std::int32_t, 2>::dense(reinterpret_cast<std::int32_t*>(to + at.nonfinite()), {at.rows, at.heads});
  if (known_) a.known = known(l.layer).sums.data();
  a.read = View<std::int32_t, 3>::dense(reinterpret_cast<std::int32_t*>(to + at.read()), {at.rows, at.heads, at.pages});
  ops::unread_mass(a, scratch_, s);
  scratch_.reset();
  const auto width = static_cast<std::size_t>(at.rows * at.width) * sizeof(float);
  copy_memory(to + at.full(), output_, width, s);
  copy_memory(to + at.ours(), l.output.data, width, s);
  if (noted_) note_all(to, at);
}

void Shadow::note_all(const std::byte* from, const Layout& at) {
  const auto* const sums = reinterpret_cast<const double*>(from);
  FullAttention::Layer layer;
  layer.output.assign(output_, output_ + at.width);
  layer.mass.assign(mass_, mass_ + std::int64_t{model_.config.heads} * total_);
  layer.sums.reserve(static_cast<std::size_t>(at.heads * at.pages));
  for (std::int64_t i = 0; i < at.heads * at.pages; ++i) layer.sums.push_back(sums[2 * i]);
  layer.rank.resize(layer.sums.size());
  std::vector<std::int64_t> order(static_cast<std::size_t>(at.pages));
  for (std::int64_t h = 0; h < at.heads; ++h) {
    const double* const mass = layer.sums.data() + h * at.pages;
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, [&](std::int64_t x, std::int64_t y) { return mass[x] > mass[y]; });
    for (std::int64_t i = 0; i < at.pages; ++i)
      layer.rank[static_cast<std::size_t>(h * at.pages + order[static_cast<std::size_t>(i)])] =
          static_cast<std::int32_t>(i);
  }
  noted_->add(std::move(layer));
}

void Shadow::compare_step(Stream s) {
  const int layers = model_.config.layers, rows = static_cast<int>(of_rows_.size());
  const Layout at = layout(rows, total_);
  const std::byte* figures = figures_.as<>();
  if (s.device() == Device::cuda) {
    host_.resize(static_cast<std::size_t>(at.bytes() * layers));
    copy_memory(host_.data(), figures, host_.size(), s);
    synchronize(s);
    figures = host_.data();
  }
  compared_.assign(static_cast<std::size_t>(layers * rows), {});
  over_rows(layers * rows, [&](std::int64_t i) {
    compared_[static_cast<std::size_t>(i)] =
        compare(static_cast<int>(i / rows), figures + at.bytes() * (i / rows), at, static_cast<int>(i % rows));
  });
  ++compared_steps_;
  for (int r = 0; r < rows; ++r) {
    Slot& slot = slots_[static_cast<std::size_t>(of_rows_[static_cast<std::size_t>(r)])];
    for (int layer = 0; slot.skipped == 0 && layer < layers; ++layer) {
      const Compared& x = compared_[static_cast<std::size_t>(layer * rows + r)];
      if (x.nonfinite > 0 && slot.rows.layer < 0) slot.rows.layer = layer;
      slot.rows.nonfinite += x.nonfinite;
      slot.rows.mass.push_back(static_cast<float>(1 - x.missed / model_.config.heads));
      slot.rows.page_recall.push_back(static_cast<float>(x.recall / model_.config.kv_heads));
      slot.rows.output_error.push_back(static_cast<float>(x.output_error));
    }
  }
}

// The figures of one row's layer.
Shadow::Compared Shadow::compare(int layer, const std::byte* from, const Layout& at, int row) const {
  const std::int64_t heads = row * at.heads, pages = heads * at.pages;
  const auto* const sums = reinterpret_cast<const double*>(from) + 2 * pages;
  const auto* const nonfinite = reinterpret_cast<const std::int32_t*>(from + at.nonfinite()) + heads;
  const auto* const read = reinterpret_cast<const std::int32_t*>(from + at.read()) + pages;
  const auto* const full = reinterpret_cast<const float*>(from + at.full()) + row * at.width;
  const auto* const ours = reinterpret_cast<const float*>(from + at.ours()) + row * at.width;
  Compared out;
  out.nonfinite = std::accumulate(nonfinite, nonfinite + at.heads, std::int64_t{0}) + count_nonfinite(full, at.width) +
                  count_nonfinite(ours, at.width);
  if (out.nonfinite > 0) {
    out.missed = out.recall = out.output_error = std::numeric_limits<double>::quiet_NaN();
    return out;
  }
  // Pages behind a row's newest token have no mass, and nobody read them.
  for (std::int64_t h = 0; h < at.heads; ++h) {
    const double* const mass = sums + h * at.pages * 2;
    for (std::int64_t p = 0; p < at.pages; ++p) out.missed += mass[2 * p + 1];
    const std::int32_t* const of_head = read + h * at.pages;
    out.recall += known_ ? known_recall(known(layer).rank.data() + h * at.pages, of_head, at.pages)
                         : recall(mass, of_head, at.pages);
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

double Shadow::known_recall(const std::int32_t* rank, const std::int32_t* read, std::int64_t pages) {
  const auto count = std::count(read, read + pages, 1);
  std::int64_t hit = 0;
  for (std::int64_t p = 0; p < pages; ++p) hit += read[p] != 0 && rank[p] < count;
  return count == 0 ? 0 : static_cast<double>(hit) / static_cast<double>(count);
}

Shadow::Rows Shadow::take(int slot) { return std::exchange(slots_[static_cast<std::size_t>(slot)].rows, {}); }

}  // namespace kvlab
