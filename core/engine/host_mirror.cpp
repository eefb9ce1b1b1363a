#include "engine/host_mirror.hpp"

#include "base/half.hpp"

namespace kvlab {
namespace {

StoreOptions mirror_options(const Shape& shape, Summary summary, int summary_bits) {
  StoreOptions o;
  o.shape = shape;
  if (o.shape.dtype == DType::f16) o.shape.dtype = DType::f32;  // the CPU's ops know no f16
  o.summary = summary;
  o.summary_bits = summary_bits;
  return o;
}

const float* rounded(const float* from, std::int64_t count, std::vector<float>& to) {
  to.resize(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < to.size(); ++i) to[i] = half_to_float(float_to_half(from[i]));
  return to.data();
}

}  // namespace

HostMirror::HostMirror(const Shape& shape, Summary summary, int summary_bits)
    : dtype_(shape.dtype), store_(mirror_options(shape, summary, summary_bits)) {
  while (store_.open() >= 0) {
  }
}

void HostMirror::release(int slot) {
  store_.close(slot);
  store_.open();  // the only free slot: the same one
}

void HostMirror::append(int layer, int slot, const float* keys, const float* values, std::int64_t tokens, int first) {
  if (dtype_ == DType::f16) {
    const std::int64_t count = tokens * shape().kv_heads * shape().head_dim;
    keys = rounded(keys, count, keys_), values = rounded(values, count, values_);
  }
  if (store_.append(layer, slot, keys, values, static_cast<int>(tokens), first) != Fit::ok)
    throw NoRoom("got no host memory for a copy of the cache, wanted as much as the GPU holds of it");
}

void HostMirror::prompt(const PromptLayer& l, const Store& store) {
  append(l.layer, l.slot, l.keys.data, l.values.data, l.keys.extent[0], store.position(l.slot));
}

void HostMirror::attended(const DecodeLayer& l, const Store& store) {
  seen_ = l;
  const std::int64_t row = std::int64_t{shape().kv_heads} * shape().head_dim;
  for (std::size_t r = 0; r < l.slots->size(); ++r) {
    const std::int64_t at = static_cast<std::int64_t>(r) * row;
    const int slot = (*l.slots)[r];
    append(l.layer, slot, l.keys.data + at, l.values.data + at, 1, store.position(slot));
  }
}

void HostMirror::point_to_host(LayerKv& kv, Stream s) {
  questions_.resize(static_cast<std::size_t>(shape().max_slots));
  copy_memory(questions_.data(), kv.question, questions_.size() * sizeof questions_[0], s);
  RopeTable rope = kv.pages.rope_table;
  if (rope.inv_freq && inv_freq_.empty()) {
    inv_freq_.resize(static_cast<std::size_t>(rope.head_dim / 2));
    copy_memory(inv_freq_.data(), rope.inv_freq, inv_freq_.size() * sizeof inv_freq_[0], s);
  }
  synchronize(s);
  if (rope.inv_freq) rope.inv_freq = inv_freq_.data();
  kv.question = questions_.data();
  slots_.assign(kv.slots, kv.slots + kv.rows());
  kv.shape = &store_.shape();
  kv.pages = store_.view(kv.layer, slots_);
  kv.pages.rope_table = rope;
  kv.host_pages = store_.view(kv.layer, slots_, Tier::host);
  pages_ = kv.pages;
  kv.keys = {&pages_, KvSide::key};
  kv.values = {&pages_, KvSide::value};
  kv.summaries = store_.summaries(kv.layer);
  kv.workspace = &store_.workspace();
  kv.max_length = store_.max_length(kv.layer, slots_);
  store_.workspace().reset();
}

LayerPrefill HostMirror::of(const LayerPrefill& l, Stream s) {
  LayerPrefill out = copy_.of(l, s);
  point_to_host(out, s);
  return out;
}

LayerStep HostMirror::of(const LayerStep& l, Stream s) {
  LayerStep out = l;
  point_to_host(out, s);
  out.queries = seen_.queries;
  out.output = seen_.output;
  out.mass = seen_.mass;
  out.page_budgets = {};
  out.max_pages = (out.max_length + shape().page_size - 1) / shape().page_size;
  return out;
}

}  // namespace kvlab
