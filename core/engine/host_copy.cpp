#include "engine/host_copy.hpp"

#include <algorithm>

#include "base/stream_memory.hpp"

namespace kvlab {
namespace {

template <class T, int Rank>
std::int64_t elements_of(const View<const T, Rank>& v) {
  std::int64_t n = v ? 1 : 0;
  for (int d = 0; d < Rank; ++d) n *= v.extent[d];
  return n;
}

}  // namespace

// Copies everything between the first and the last element in one transfer.
template <class T, int Rank>
void HostCopy::fetch(const View<const T, Rank>& from, Array<T>& to, Stream s) {
  if (elements_of(from) == 0) return;
  std::int64_t span = 1;
  for (int d = 0; d < Rank; ++d) span += (from.extent[d] - 1) * from.stride[d];
  const auto count = static_cast<std::size_t>(span);
  if (to.raw.size() < count) to.raw.resize(count);
  copy_memory(to.raw.data(), from.data, count * sizeof(T), s);
}

template <class T, int Rank>
View<T, Rank> HostCopy::dense(const View<const T, Rank>& from, Array<T>& to) {
  const std::int64_t elements = elements_of(from);
  if (elements == 0) return {};
  const auto as_it_is = View<T, Rank>::dense(to.raw.data(), from.extent);
  bool in_order = true;
  for (int d = 0; d < Rank; ++d) in_order &= from.extent[d] == 1 || from.stride[d] == as_it_is.stride[d];
  if (in_order) return as_it_is;
  if (to.dense.size() < static_cast<std::size_t>(elements)) to.dense.resize(static_cast<std::size_t>(elements));
  const std::int64_t inner = from.extent[Rank - 1], step = from.stride[Rank - 1];
  for (std::int64_t row = 0; row < elements / inner; ++row) {
    std::int64_t at = 0, rest = row;
    for (int d = Rank - 2; d >= 0; --d) {
      at += rest % from.extent[d] * from.stride[d];
      rest /= from.extent[d];
    }
    const T* row_from = to.raw.data() + at;
    T* row_to = to.dense.data() + row * inner;
    if (step == 1)
      std::copy_n(row_from, inner, row_to);
    else
      for (std::int64_t i = 0; i < inner; ++i) row_to[i] = row_from[i * step];
  }
  return View<T, Rank>::dense(to.dense.data(), from.extent);
}

template <class Layer>
void HostCopy::fetch_all(const Layer& l, Stream s) {
  fetch(l.queries, floats_[0], s);
  fetch(l.raw_queries, floats_[1], s);
  fetch(l.keys, floats_[2], s);
  fetch(l.raw_keys, floats_[3], s);
  fetch(l.values, floats_[4], s);
  fetch(l.output, floats_[5], s);
  fetch(l.mass, floats_[6], s);
}

template <class Layer>
Layer HostCopy::dense_all(const Layer& l) {
  Layer out = l;
  out.queries = dense(l.queries, floats_[0]);
  out.raw_queries = dense(l.raw_queries, floats_[1]);
  out.keys = dense(l.keys, floats_[2]);
  out.raw_keys = dense(l.raw_keys, floats_[3]);
  out.values = dense(l.values, floats_[4]);
  out.output = dense(l.output, floats_[5]);
  out.mass = dense(l.mass, floats_[6]);
  return out;
}

PromptLayer HostCopy::of(const PromptLayer& l, bool keys_and_values_only, Stream s) {
  PromptLayer wanted = l;
  if (keys_and_values_only) wanted.queries = wanted.raw_queries = wanted.output = {}, wanted.mass = {};
  fetch_all(wanted, s);
  synchronize(s);
  return dense_all(wanted);
}

DecodeLayer HostCopy::of(const DecodeLayer& l, Stream s) {
  fetch_all(l, s);
  View<const std::int32_t, 3> index;
  View<const std::int32_t, 2> count;
  const IndexList* list = l.read.pages ? static_cast<const IndexList*>(l.read.pages) : l.read.tokens;
  if (list) {
    index = list->index, count = list->count;
    fetch(index, index_, s);
    fetch(count, count_, s);
  }
  synchronize(s);
  DecodeLayer out = dense_all(l);
  if (!list) return out;
  const IndexList here{dense(index, index_), dense(count, count_)};
  if (l.read.pages)
    out.read.pages = &(pages_ = {here});
  else
    out.read.tokens = &(tokens_ = {here});
  return out;
}

LayerPrefill HostCopy::of(const LayerPrefill& l, Stream s) {
  const auto window = l.window_queries ? l.window_queries.f32() : View<const float, 4>{};
  fetch(l.mass, floats_[6], s);
  fetch(window, window_, s);
  synchronize(s);
  LayerPrefill out = l;
  out.mass = dense(l.mass, floats_[6]);
  out.window_queries = dense(window, window_);
  return out;
}

}  // namespace kvlab
