#include "engine/host_copy.hpp"

#include <algorithm>

#include "base/stream_memory.hpp"

namespace kvlab {

// One transfer of all that lies between the first and the last element; then they move together here.
template <class T, int Rank>
View<const T, Rank> HostCopy::copy(const View<const T, Rank>& from, std::vector<T>& to, Stream s) {
  to.clear();
  if (!from) return {};
  std::int64_t span = 1, elements = 1;
  for (int d = 0; d < Rank; ++d) {
    elements *= from.extent[d];
    span += (from.extent[d] - 1) * from.stride[d];
  }
  if (elements == 0) return {};
  std::vector<T> raw(static_cast<std::size_t>(span));
  copy_memory(raw.data(), from.data, raw.size() * sizeof(T), s);
  synchronize(s);
  if (span == elements) {
    to = std::move(raw);
  } else {
    to.reserve(static_cast<std::size_t>(elements));
    const std::int64_t inner = from.extent[Rank - 1], step = from.stride[Rank - 1];
    for (std::int64_t row = 0; row < elements / inner; ++row) {
      std::int64_t at = 0, rest = row;
      for (int d = Rank - 2; d >= 0; --d) {
        at += rest % from.extent[d] * from.stride[d];
        rest /= from.extent[d];
      }
      for (std::int64_t i = 0; i < inner; ++i) to.push_back(raw[static_cast<std::size_t>(at + i * step)]);
    }
  }
  return View<const T, Rank>::dense(to.data(), from.extent);
}

template <class Layer>
Layer HostCopy::arrays_of(const Layer& l, Stream s) {
  Layer out = l;
  out.queries = copy(l.queries, floats_[0], s);
  out.raw_queries = copy(l.raw_queries, floats_[1], s);
  out.keys = copy(l.keys, floats_[2], s);
  out.raw_keys = copy(l.raw_keys, floats_[3], s);
  out.values = copy(l.values, floats_[4], s);
  out.output = copy(l.output, floats_[5], s);
  out.mass = copy(l.mass, floats_[6], s);
  return out;
}

PromptLayer HostCopy::of(const PromptLayer& l, Stream s) { return arrays_of(l, s); }

DecodeLayer HostCopy::of(const DecodeLayer& l, Stream s) {
  DecodeLayer out = arrays_of(l, s);
  if (!l.pages) return out;
  const View<const std::int32_t, 3> index = l.pages->index;
  const View<const std::int32_t, 2> count = l.pages->count;
  copy(index, index_, s);
  copy(count, count_, s);
  pages_.index = View<std::int32_t, 3>::dense(index_.data(), l.pages->index.extent);
  pages_.count = View<std::int32_t, 2>::dense(count_.data(), l.pages->count.extent);
  out.pages = &pages_;
  return out;
}

}  // namespace kvlab
