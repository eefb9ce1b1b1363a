#include "compose/over_layers.hpp"

#include <kvlab/ops.hpp>

#include <algorithm>

#include "base/stream_memory.hpp"
#include "ops/select/allot.hpp"

namespace kvlab {
namespace {

// The newest n of these queries.
Tensor<4> newest(const Tensor<4>& queries, int n) {
  if (!queries || n == 0) return {};
  View<const float, 4> q = queries.f32();
  const std::int64_t more = std::max<std::int64_t>(0, q.extent[2] - n);
  q.data += more * q.stride[2];
  q.extent[2] -= more;
  return q;
}

}  // namespace

OverLayers::OverLayers(Budget& budget, Scorer& scorer, const Needs& of_scorer)
    : budget_(budget), scorer_(scorer), of_scorer_(of_scorer), count_(budget.numbers()) {}

Needs OverLayers::needs() const {
  Needs both = of_scorer_;
  return both.window_queries(std::max(both.window_queries(), budget_.window_queries()))
      .scratch_numbers(both.scratch_numbers() + 4)
      .finish_prompt(true);
}

void OverLayers::attach(const Shape& shape, int dense_layers, Workspace& w) {
  shape_ = shape, dense_layers_ = dense_layers;
  heads_ = std::int64_t{std::max(0, shape.layers - dense_layers)} * shape.kv_heads;
  longest_ = std::int64_t{shape.max_pages()} * shape.page_size;
  const auto room = [&](const char* tag, std::int64_t numbers) {
    return w.room(tag, static_cast<std::size_t>(std::max<std::int64_t>(1, numbers)) * 4);
  };
  scores_ = static_cast<float*>(room("a prompt's scores", heads_ * longest_));
  measured_ = static_cast<float*>(room("what a budget measures", heads_ * count_));
  lengths_ = static_cast<std::int32_t*>(room("a prompt's lengths", heads_));
  of_slots_ = static_cast<std::int32_t*>(w.state(
      "a budget over layers", static_cast<std::size_t>(std::max<std::int64_t>(1, heads_)) * 4, shape.max_slots));
}

LayerPrefill OverLayers::for_scorer(const LayerPrefill& kv) const {
  LayerPrefill own = kv;
  own.window_queries = newest(kv.window_queries, of_scorer_.window_queries());
  return own;
}

Scores OverLayers::held(const LayerKv& kv) const {
  return {scores_ + first_head(kv) * longest_,
          {1, shape_.kv_heads, kv.max_length},
          {longest_ * shape_.kv_heads, longest_, 1}};
}

void OverLayers::measure(const LayerPrefill& kv, int tokens, Stream s) {
  tokens_ = tokens;
  pins_ = scorer_.pins(tokens);
  scorer_.score(for_scorer(kv), held(kv), s);
  LayerPrefill own = kv;
  own.window_queries = newest(kv.window_queries, budget_.window_queries());
  budget_.measure(own, held(kv), pins_,
                  View<float, 3>::dense(measured_ + first_head(kv) * count_, {1, shape_.kv_heads, count_}), s);
  ops::lengths(kv.pages, View<std::int32_t, 2>::dense(lengths_ + first_head(kv), {1, shape_.kv_heads}), s);
}

void OverLayers::divide(const LayerKv& kv, int unit, int whole, Stream s) {
  const auto heads = static_cast<std::size_t>(heads_);
  keep_.assign(heads, whole);
  if (divided()) {
    Division d;
    d.layers = shape_.layers - dense_layers_;
    d.kv_heads = shape_.kv_heads;
    d.tokens = tokens_;
    d.pinned = pins_.first + pins_.last;
    d.length.resize(heads);
    d.measured.resize(heads * static_cast<std::size_t>(count_));
    copy_memory(d.length.data(), lengths_, heads * 4, s);
    copy_memory(d.measured.data(), measured_, d.measured.size() * 4, s);
    synchronize(s);
    keep_ = budget_.divide(d);
    for (std::size_t i = 0; i < heads; ++i)
      if (keep_[i] < d.length[i]) keep_[i] -= keep_[i] % unit;
  }
  copy_memory(of_slots_ + kv.slots[0] * std::max<std::int64_t>(1, heads_), keep_.data(), heads * 4, s);
}

View<const std::int32_t, 2> OverLayers::keep(const LayerKv& kv) const {
  return kv.upload_heads("divided budget", keep_.data() + first_head(kv));
}

void OverLayers::keep_of_rows(const LayerKv& kv, View<std::int32_t, 2> keep, Stream s) const {
  const View<const std::int32_t, 2> of_layer{
      of_slots_ + first_head(kv), {shape_.max_slots, shape_.kv_heads}, {heads_, 1}};
  ops::numbers_of_rows(of_layer, kv.pages.slots, keep, s);
}

}  // namespace kvlab
