#include "compose/injection.hpp"

#include <algorithm>
#include <utility>

namespace kvlab {

Injector::Injector(Injection injection, const Shape& shape, Workspace& w)
    : injection_(std::move(injection)), shape_(shape), words_(ops::inject_words(shape.max_pages())) {
  const auto bytes = static_cast<std::size_t>(words_) * sizeof(std::uint32_t) * static_cast<std::size_t>(shape.layers) *
                     static_cast<std::size_t>(shape.kv_heads);
  state_ = static_cast<std::uint32_t*>(w.state("injected pages", bytes, shape.max_slots));
  sequence_ = static_cast<std::uint32_t*>(w.state("injected sequence", sizeof(std::uint32_t), shape.max_slots));
}

namespace {

// Index of the recorded layer that a layer follows: its own if that was recorded, else one by the layer's number.
int layer_of(const std::vector<int>& recorded, int layer) {
  const auto own = std::lower_bound(recorded.begin(), recorded.end(), layer);
  if (own != recorded.end() && *own == layer) return static_cast<int>(own - recorded.begin());
  return layer % static_cast<int>(recorded.size());
}

}  // namespace

void Injector::begin(const LayerPrefill& kv, Stream s) {
  if (kv.layer > 0) return;
  for (int row = 0; row < kv.rows(); ++row)
    copy_memory(sequence_ + kv.slots[row], kv.sequence + row, sizeof *sequence_, s);
}

void Injector::replace(const LayerStep& step, const PageList& list, const Pins& pins, Stream s) {
  if (injection_.recorded && !recorded_.first) upload(s);
  const std::int64_t layer = shape_.kv_heads * words_;
  ops::InjectArgs a;
  a.pages = step.pages;
  a.list = list;
  a.pins = pins;
  a.state = {
      state_ + layer * step.layer, {shape_.max_slots, shape_.kv_heads, words_}, {layer * shape_.layers, words_, 1}};
  a.sequence = sequence_;
  a.question = step.question;
  a.layer = step.layer;
  a.seed = injection_.seed;
  a.overlap = injection_.overlap;
  a.recorded = recorded_;
  if (injection_.recorded) a.recorded.layer = layer_of(injection_.recorded->layers, step.layer);
  ops::inject_pages(a, s);
}

// Scales recorded page numbers to a sequence's room. The whole run has one factor, so shared pages of two lists stay
// shared.
void Injector::upload(Stream s) {
  const RecordedTrace& r = *injection_.recorded;
  std::vector<std::int32_t> page;
  page.reserve(r.page.size());
  for (const std::int32_t p : r.page)
    page.push_back(static_cast<std::int32_t>(std::int64_t{p} * shape_.max_pages() / r.pages));
  const auto put = [&](StreamMemory& to, const auto& from) {
    to = StreamMemory(s, from.size() * sizeof from[0]);
    copy_memory(to.as<>(), from.data(), to.bytes(), s);
  };
  std::vector<std::int32_t> first, steps;
  for (const std::int32_t question : injection_.follows) {
    first.push_back(r.questions[static_cast<std::size_t>(question)].first);
    steps.push_back(r.questions[static_cast<std::size_t>(question)].steps);
  }
  put(first_, first), put(steps_, steps), put(begin_, r.begin), put(page_, page);
  synchronize(s);
  recorded_.first = first_.as<std::int32_t>(), recorded_.steps = steps_.as<std::int32_t>();
  recorded_.begin = begin_.as<std::int64_t>(), recorded_.page = page_.as<std::int32_t>();
  recorded_.questions = static_cast<int>(first.size());
  recorded_.layers = static_cast<int>(r.layers.size()), recorded_.heads = r.heads;
}

}  // namespace kvlab
