// CudaStore stores tokens in two codecs, and hands extents of its arena to the pools of their frames.
#include <kvlab/error.hpp>

#include <algorithm>
#include <limits>

#include "base/device_op.hpp"
#include "store/cuda_store.hpp"

namespace kvlab {

Applied CudaStore::encode_pages(const Edit& e, const std::vector<std::int32_t>& slots) {
  if (slots.empty() || !two_codecs()) return {Fit::ok, -1};  // all pages have the one codec already
  settle();
  note_lowered(e.layer, slots);
  if (e.codec > 0) encoded_of_head_ = std::max(encoded_of_head_, e.list.index.extent[2]);
  Frames most = {};
  most[e.codec > 0 ? lower_pool : device_pool] =
      static_cast<std::int64_t>(slots.size()) * options_.shape.kv_heads * e.list.index.extent[2];
  if (!reserve_edit(most)) return {Fit::out_of_memory, 0};
  stale_ = true;
  CudaStoreEncode a;
  a.slots = rows_of(slots);
  a.rows = static_cast<int>(slots.size());
  a.index = e.list.index;
  a.count = e.list.count;
  a.edit = ++edit_;
  a.codec = e.codec;
  const std::int64_t most_pages = e.list.index.extent[2];
  if (const bool on_host = options_.planned_on_host; e.codec > 0 && most_pages > (on_host ? 0 : 1)) {
    const std::int64_t heads = std::int64_t{a.rows} * options_.shape.kv_heads;
    a.runs = take_scratch<CudaStoreEncode::Run>(workspace(), "encode", {heads}).data;
    if (on_host)
      plan_on_host(a, e.layer, slots);
    else
      only_on_cuda<cuda_store::plan_encode>(layer(e.layer), a, stream_);
  }
  only_on_cuda<cuda_store::encode>(layer(e.layer), a, stream_);
  return {Fit::ok, -1};
}

Applied CudaStore::store_levels(const Edit& e, const std::vector<std::int32_t>& slots) {
  const Shape& s = options_.shape;
  CudaStoreLevels a;
  a.rows = static_cast<int>(slots.size());
  // In a graph the sizes must not depend on lengths.
  const std::int64_t room = static_cast<std::int64_t>(pages_per_head_) * s.page_size;
  a.most = in_graph_ ? static_cast<int>(room) : max_length(e.layer, slots);
  if (slots.empty() || a.most == 0) return {Fit::ok, -1};
  settle();
  if (two_codecs()) note_lowered(e.layer, slots);
  const std::int64_t heads = std::int64_t{a.rows} * s.kv_heads, pages = (a.most + s.page_size - 1) / s.page_size;
  if (!reserve_edit({heads * pages, 0, two_codecs() ? heads * pages : 0})) return {Fit::out_of_memory, 0};
  stale_ = true;
  a.slots = rows_of(slots);
  a.levels = e.levels;
  a.edit = ++edit_;
  a.begins = take_scratch<CudaStoreLevels::Begin>(workspace(), "levels", {heads, a.chunks()}).data;
  a.fresh = take_scratch<PageEntry>(workspace(), "levels", {heads, pages}).data;
  a.plans = take_scratch<CudaStoreLevels::Plan>(workspace(), "levels", {heads}).data;
  if (options_.planned_on_host)
    plan_on_host(a, e.layer, slots);
  else
    only_on_cuda<cuda_store::plan_levels>(layer(e.layer), a, stream_);
  only_on_cuda<cuda_store::store_levels>(layer(e.layer), a, stream_);
  return {Fit::ok, -1};
}

bool CudaStore::reserve_edit(const Frames& most) {
  if (in_graph_)
    for (std::size_t t = 0; t < pools; ++t) taken_.frames[t] += most[t];
  return reserved_ || reserve(most);
}

// Beside frames of the first codec for all tokens: what a layer's store_as and a step's encode edits reserve, and what
// extents hold that are partly empty.
std::int64_t CudaStore::room_for_codecs() const {
  const Shape& s = options_.shape;
  const std::int64_t both = layouts_[0].bytes + layouts_[1].bytes;
  return std::int64_t{s.kv_heads} * s.max_pages() * both + heads_ * layouts_[1].bytes +
         heads_ * s.max_pages() * layouts_[0].bytes / 8 + 32 * both;
}

// Chooses an extent that both sizes of frames nearly fill.
std::int64_t CudaStore::extent_bytes(std::int64_t a, std::int64_t b) {
  std::int64_t best = 0;
  double least = 2;
  for (std::int64_t bytes = std::max(a, b); bytes <= 16 * std::max(a, b); bytes += granule_bytes) {
    const double waste = static_cast<double>(bytes % a + bytes % b) / static_cast<double>(bytes);
    if (waste < least) least = waste, best = bytes;
  }
  return best;
}

std::int64_t CudaStore::make_extents(std::int64_t most_bytes) {
  const std::int64_t sizes[] = {layouts_[0].bytes, 0, layouts_[1].bytes};
  extents_.bytes = extent_bytes(sizes[device_pool], sizes[lower_pool]);
  const std::int64_t most = std::numeric_limits<std::int32_t>::max() / (extents_.bytes / granule_bytes);
  const std::int64_t count = std::clamp<std::int64_t>(most_bytes / extents_.bytes, 1, most);
  extents_.owner.assign(static_cast<std::size_t>(count), -1);
  for (std::int64_t i = count; i-- > 0;) extents_.left.push_back(static_cast<std::int32_t>(i));
  std::int64_t places = 0;
  for (const CudaPool pool : {device_pool, lower_pool}) {
    extents_.each[pool] = static_cast<std::int32_t>(extents_.bytes / sizes[pool]);
    make_pool(pool, 0, extents_.frames(pool));
    places = std::max(places, extents_.frames(pool));
  }
  extents_.lists = StreamMemory(stream_, static_cast<std::size_t>(2 * count + places + 1) * sizeof(std::int32_t));
  return count * extents_.bytes;
}

CudaExtents CudaStore::extents_of(CudaPool pool) const {
  const auto all = static_cast<std::int64_t>(extents_.owner.size());
  CudaExtents e;
  e.bytes = extents_.bytes;
  e.each = extents_.each[pool];
  e.step = static_cast<std::int32_t>(layout_of(pool).bytes / granule_bytes);
  e.extents = e.begin = extents_.lists.as<std::int32_t>();
  e.free = extents_.lists.as<std::int32_t>() + all;
  e.list_count = e.free + all;
  e.list = e.list_count + 1;
  e.count = static_cast<int>(all);
  return e;
}

void CudaStore::grow(CudaPool pool, std::int64_t frames) {
  const std::int64_t each = extents_.each[pool];
  const auto needed = [&] { return (frames - free_bound_[pool] + each - 1) / each; };
  const auto left = [&] { return static_cast<std::int64_t>(extents_.left.size()); };
  if (left() < needed()) reclaim();  // which also takes free extents of this pool
  // More than is needed now, so that this is seldom called.
  const std::int64_t taken = std::min(left(), std::max(needed(), left() / 8));
  if (taken < 1) return;
  const std::vector<std::int32_t> fresh(extents_.left.end() - taken, extents_.left.end());
  extents_.left.resize(extents_.left.size() - static_cast<std::size_t>(taken));
  for (const std::int32_t extent : fresh)
    extents_.owner[static_cast<std::size_t>(extent)] = static_cast<std::int8_t>(pool);
  CudaExtents e = extents_of(pool);
  e.count = static_cast<int>(taken);
  copy_memory(extents_.lists.as<>(), fresh.data(), fresh.size() * sizeof(std::int32_t), stream_);
  only_on_cuda<cuda_store::grant>(layer(0), pool, e, stream_);
  synchronize(stream_);
  capacity_[pool] += taken * each;
  known_.given[pool] += static_cast<std::int32_t>(taken * each);
  known_.frames[pool] += static_cast<std::int32_t>(taken * each);
  free_bound_[pool] += taken * each;
}

// Orders a pool's free frames, so that those of the first extents are taken first.
void CudaStore::arrange(CudaPool pool) {
  const CudaExtents e = extents_of(pool);
  zero_memory(e.free, extents_.owner.size() * sizeof(std::int32_t), stream_);
  only_on_cuda<cuda_store::arrange>(layer(0), pool, e, stream_);
}

// Takes extents back whose frames are all free.
void CudaStore::reclaim() {
  settle();
  const std::size_t all = extents_.owner.size();
  std::vector<std::int32_t> free(all);
  zero_memory(extents_of(device_pool).free, all * sizeof(std::int32_t), stream_);
  for (const CudaPool pool : {device_pool, lower_pool})
    only_on_cuda<cuda_store::count_free>(layer(0), pool, extents_of(pool), stream_);
  copy_memory(free.data(), extents_of(device_pool).free, all * sizeof(std::int32_t), stream_);
  synchronize(stream_);
  for (const CudaPool pool : {device_pool, lower_pool}) {
    const std::size_t before = extents_.left.size();
    for (std::size_t i = 0; i < all; ++i)
      if (extents_.owner[i] == static_cast<std::int8_t>(pool) && free[i] == extents_.each[pool]) {
        extents_.owner[i] = -1;
        extents_.left.push_back(static_cast<std::int32_t>(i));
      }
    if (extents_.left.size() == before) continue;
    zero_memory(extents_of(pool).list_count, sizeof(std::int32_t), stream_);
    only_on_cuda<cuda_store::take_out>(layer(0), pool, extents_of(pool), stream_);
    capacity_[pool] -= static_cast<std::int64_t>(extents_.left.size() - before) * extents_.each[pool];
  }
  stale_ = true;
  update();
}

}  // namespace kvlab
