#include "run/shadow.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/finite.hpp"
#include "ops/attend/attend.hpp"
#include "ops/page/paged.hpp"

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

Shadow::Shadow(const Model& model, int page_size, int max_tokens)
    : model_(model), store_(shadow_options(model, page_size, max_tokens)) {
  store_.open();
}

void Shadow::reset() {
  store_.close(0);
  store_.open();
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

void Shadow::prompt(const PromptLayer& l, const Store& store) {
  const int first = store.position(l.slot), n = static_cast<int>(l.keys.extent[0]);
  const float* k = original(l.keys, l.raw_keys, first, keys_);
  store_.append(l.layer, 0, k, l.values.data, n, first);
  if (l.layer + 1 == model_.config.layers) store_.advance(0, n, false);
}

void Shadow::attended(const DecodeLayer& l, const Store& store) {
  const ModelConfig& c = model_.config;
  const int newest = store.position((*l.slots)[0]), total = newest + 1;
  const float* q = original(l.queries, l.raw_queries, newest, queries_);
  const float* k = original(l.keys, l.raw_keys, newest, keys_);
  store_.append(l.layer, 0, k, l.values.data, 1, newest);
  if (skipped_ > 0) {
    if (l.layer + 1 == c.layers) store_.advance(0, 1, true), --skipped_;
    return;
  }

  const std::size_t width = static_cast<std::size_t>(c.heads * c.head_dim);
  output_.resize(width);
  mass_.resize(static_cast<std::size_t>(c.heads) * static_cast<std::size_t>(total));
  ops::AttendArgs a;
  a.kv = store_.view(l.layer, slots_);
  a.queries = View<const float, 3>::dense(q, {1, c.heads, c.head_dim});
  a.softmax_scale = 1.f / std::sqrt(static_cast<float>(c.head_dim));
  a.window = c.sliding_window;
  const std::int32_t last[] = {newest};
  a.last = last;
  a.out = View<float, 3>::dense(output_.data(), {1, c.heads, c.head_dim});
  a.mass = View<float, 3>::dense(mass_.data(), {1, c.heads, total});
  ops::attend(a, store_.workspace(), Stream::cpu());
  store_.workspace().reset();

  if (l.layer + 1 == c.layers) store_.advance(0, 1, true);
  if (!finite(l.layer, l.output.data)) {
    constexpr double nan = std::numeric_limits<double>::quiet_NaN();
    return add(nan, nan, nan);
  }

  const int p = store_.shape().page_size, pages = (total + p - 1) / p, group = c.group();
  double missed = 0, recall = 0;
  std::vector<char> seen;
  std::vector<double> page_mass;
  std::vector<int> order(static_cast<std::size_t>(pages));
  for (int head = 0; head < c.kv_heads; ++head) {
    seen.assign(static_cast<std::size_t>(total), 0);
    attended_positions(l, store, head, c.sliding_window, seen);
    page_mass.assign(static_cast<std::size_t>(pages), 0);
    for (int g = 0; g < group; ++g)
      for (int t = 0; t < total; ++t) {
        const double m = a.mass(0, head * group + g, t);
        if (!seen[static_cast<std::size_t>(t)]) missed += m;
        page_mass[static_cast<std::size_t>(t / p)] += m;
      }
    std::vector<char> chosen(static_cast<std::size_t>(pages), 0);
    for (int t = 0; t < total; ++t)
      if (seen[static_cast<std::size_t>(t)]) chosen[static_cast<std::size_t>(t / p)] = 1;
    const int count = static_cast<int>(std::count(chosen.begin(), chosen.end(), 1));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int x, int y) {
      return page_mass[static_cast<std::size_t>(x)] > page_mass[static_cast<std::size_t>(y)];
    });
    int hit = 0;
    for (int i = 0; i < count; ++i) hit += chosen[static_cast<std::size_t>(order[static_cast<std::size_t>(i)])];
    recall += count ? static_cast<double>(hit) / count : 0;
  }
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < width; ++i) {
    const double full = output_[i], ours = l.output.data[i];
    difference += (ours - full) * (ours - full);
    norm += full * full;
  }
  add(1 - missed / c.heads, recall / c.kv_heads, difference > 0 ? std::sqrt(difference / norm) : 0);
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
