// CudaStore passes edits to the device.
#include <algorithm>

#include "base/device_op.hpp"
#include "base/put_off.hpp"
#include "ops/retrieve/attend_chosen.hpp"
#include "store/cuda_store.hpp"
#include "store/host_tier.hpp"

namespace kvlab {
namespace {

constexpr int layers_of_fetch = 4;  // that share a launch beside a step

template <class Args>
Args list_of(const Edit& e, const std::int32_t* slots, std::size_t rows, unsigned long long number) {
  Args a;
  if constexpr (requires { a.list_slots; }) a.list_slots = e.list.slots;
  a.slots = slots;
  a.rows = static_cast<int>(rows);
  a.index = e.list.index;
  a.count = e.list.count;
  a.edit = number;
  return a;
}

}  // namespace

Applied CudaStore::keep_tokens(const Edit& e, const std::vector<std::int32_t>& slots) {
  if (slots.empty()) return {Fit::ok, -1};
  settle();
  stale_ = true;
  tails_stay_ = false;  // the last page that stays may be one of the host
  const auto list = list_of<CudaStoreList>(e, rows_of(slots), slots.size(), ++edit_);
  if (e.verb == Edit::evict) {
    only_on_cuda<cuda_store::evict>(layer(e.layer), list, stream_);
    return {Fit::ok, -1};
  }
  only_on_cuda<cuda_store::keep>(layer(e.layer), list, stream_);
  for (int slot : slots)
    bound(e.layer, slot) =
        static_cast<std::int32_t>(std::min<std::int64_t>(bound(e.layer, slot), list.index.extent[2]));
  return {Fit::ok, -1};
}

Applied CudaStore::evict_surplus(const Edit& e, const std::vector<std::int32_t>& slots, ops::Finding* nan) {
  if (slots.empty()) return {Fit::ok, -1};
  evict_together({{e, slots, nan}});
  return {Fit::ok, -1};
}

// Scratch is other memory by then. Ranks under re_rotate take memory of every token of a layer. Where pages cross
// tiers, later edits of the step may want the frames.
bool CudaStore::may_leave_later(const Edit& e) const {
  const Surplus& of = e.surplus;
  const bool tiers = takes_host_tier(options_) || pages_below();
  if (of.scores || options_.rope == RopeRegime::re_rotate || tiers) return false;
  return !workspace_.is_scratch(of.keep.data) && !workspace_.is_scratch(of.pins);
}

void CudaStore::evict_together(const std::vector<Leaving>& all) {
  settle();
  stale_ = true;
  tails_stay_ = false;
  const auto to_next_keep = [&](std::size_t i) {
    const auto at = [&](std::size_t k) { return reinterpret_cast<std::intptr_t>(all[k].edit.surplus.keep.data); };
    return (at(i) - at(i - 1)) / static_cast<std::intptr_t>(sizeof(std::int32_t));
  };
  for (std::size_t begin = 0, end = 0; begin < all.size(); begin = end) {
    const Leaving& first = all[begin];
    const Surplus& of = first.edit.surplus;
    const auto goes_on = [&](const Leaving& next, std::size_t i) {
      const Surplus& s = next.edit.surplus;
      return next.edit.layer == first.edit.layer + static_cast<int>(i - begin) && next.slots == first.slots &&
             next.nan == first.nan && s.column == of.column && s.pins == of.pins && s.keep.stride == of.keep.stride &&
             to_next_keep(i) == to_next_keep(begin + 1);
    };
    for (end = begin + 1; end < all.size() && goes_on(all[end], end);) ++end;
    CudaStoreSurplus a;
    a.slots = rows_of(first.slots);
    a.rows = static_cast<int>(first.slots.size());
    a.of = of;
    a.layer = first.edit.layer;
    a.layers = static_cast<int>(end - begin);
    a.slots_of_layer = options_.shape.max_slots;
    a.next_keep = a.layers > 1 ? to_next_keep(begin + 1) : 0;
    a.nan = first.nan;
    a.edit = edit_ + 1;
    edit_ += static_cast<unsigned>(a.layers);
    a.last = last_of_layers(0) + a.layer;
    only_on_cuda<cuda_store::evict_surplus>(layer(a.layer), a, stream_);
  }
}

Applied CudaStore::swap_tokens(const Edit& e, const std::vector<std::int32_t>& slots) {
  if (slots.empty()) return {Fit::ok, -1};
  settle();
  stale_ = true;
  const auto pairs = list_of<CudaStoreList>(e, rows_of(slots), slots.size(), ++edit_);
  only_on_cuda<cuda_store::swap_places>(layer(e.layer), pairs, stream_);
  return {Fit::ok, -1};
}

std::optional<Applied> CudaStore::step_down(const std::array<Edit, 3>& edits, const std::vector<std::int32_t>& slots) {
  if (!two_codecs() || slots.empty() || options_.planned_on_host || options_.rope == RopeRegime::re_rotate ||
      options_.codecs[0].grouped() || options_.codecs[1].grouped())
    return std::nullopt;
  settle();
  note_lowered(0, slots);
  Frames most = {};
  most[lower_pool] = static_cast<std::int64_t>(slots.size()) * options_.shape.kv_heads;
  if (!reserve_edit(most)) return Applied{Fit::out_of_memory, 0};
  stale_ = true;
  tails_stay_ = false;
  const auto list = [&](const Edit& e) { return list_of<CudaStoreList>(e, rows_of(slots), slots.size(), ++edit_); };
  CudaStoreStep a;
  a.move = list(edits[0]), a.evict = list(edits[1]), a.lower = list(edits[2]);
  only_on_cuda<cuda_store::step_down>(layer(0), a, stream_);
  return Applied{Fit::ok, -1};
}

Applied CudaStore::rewrite_rows(const Edit& e, const std::vector<std::int32_t>& slots) {
  if (slots.empty()) return {Fit::ok, -1};
  settle();
  stale_ = true;
  const CudaStoreRewrite a{
      {rows_of(slots), static_cast<int>(slots.size())}, e.side == KvSide::key, e.rows, e.range, ++edit_};
  only_on_cuda<cuda_store::rewrite>(layer(e.layer), a, stream_);
  return {Fit::ok, -1};
}

Applied CudaStore::edit_pages(const Edit& e, const std::vector<std::int32_t>& slots) {
  if (e.verb == Edit::encode) return encode_pages(e, slots);
  if (slots.empty()) return {Fit::ok, -1};
  if (two_codecs())
    throw Error(Errc::unsupported, "got an edit of tiers in a cache of two codecs, wanted one codec",
                "the cache on CUDA");
  stale_ = true;
  auto a = list_of<CudaStorePageEdit>(e, rows_of(slots), slots.size(), ++edit_);
  a.verb = e.verb == Edit::offload  ? CudaStorePageEdit::offload
           : e.verb == Edit::recall ? CudaStorePageEdit::recall
                                    : CudaStorePageEdit::drop;
  a.tier = e.tier;
  tails_stay_ = false;
  if (e.verb == Edit::offload && !open_host_tier()) return {Fit::out_of_memory, 0};
  return {launch_page_edit(a, e.layer, slots), -1};
}

CudaStorePlace CudaStore::place_of(const Edit& e, const std::vector<std::int32_t>& slots) {
  auto a = list_of<CudaStorePlace>(e, rows_of(slots), slots.size(), ++edit_);
  a.last = last_of_layers(1) + e.layer;
  a.heads = e.heads;
  a.pins = e.pins;
  a.room = e.room;
  a.rooms = e.rooms;
  // Frames that copies give back after the step would be taken twice until then, and the host would not know.
  a.reuse = e.reuse || (e.when.kind == Deadline::sequence && capped(Tier::device));
  a.keep = static_cast<int>(2 * heads_);  // in each layer an append and a place edit may take one for each head
  a.order = e.order;
  if (e.keys && options_.host_codec == options_.codecs[0]) {
    a.keys = *e.keys;
    a.rebuilds = rebuilds_.as<CudaStorePlace::Rebuild>();
    a.rebuild_counts = rebuild_counts_.as<std::int32_t>();
  }
  // In a graph the sizes must not depend on lengths.
  const int p = options_.shape.page_size;
  a.most = in_graph_ ? static_cast<int>(pages_per_head_) : (max_length(e.layer, slots) + p - 1) / p;
  return a;
}

void CudaStore::mark_heads(const Heads& heads, const std::vector<std::int32_t>& slots, HeadFlags out) {
  const CudaStoreRows rows{rows_of(slots), static_cast<int>(slots.size())};
  only_on_cuda<cuda_store::mark_heads>(heads, rows, out, working());
}

std::vector<std::uint8_t> CudaStore::marked(const Heads& heads, const std::vector<std::int32_t>& slots) {
  const Shape& s = options_.shape;
  std::vector<std::uint8_t> out(static_cast<std::size_t>(s.max_slots * s.kv_heads));
  const StreamMemory marks(stream_, out.size());
  mark_heads(heads, slots, HeadFlags::dense(marks.as<std::uint8_t>(), {s.max_slots, s.kv_heads}));
  copy_memory(out.data(), marks.as<>(), out.size(), working());
  synchronize(working());
  return out;
}

void CudaStore::count_spare(const Edit& e, int slot) {
  CudaStorePlace a = place_of(e, {slot});
  a.spare = spare_counts_.as<Spare>() + layer_slot(e.layer, 0);
  zero_memory(a.spare + slot, sizeof *a.spare, stream_);
  stale_ = true;
  if (a.most == 0) return;
  only_on_cuda<cuda_store::plan_places>(layer(e.layer), std::vector{a}, stream_);
}

// Copies the planned pages and leaves jobs that only give frames back.
void CudaStore::copy_placed_by_host(const CudaStoreLayer& l, const CudaStorePlace& a, Stream s) const {
  using Move = CudaStorePlace::Move;
  std::int32_t count = 0;
  copy_memory(&count, a.counts, sizeof count, s);
  synchronize(s);
  if (count == 0) return;
  std::vector<Move> jobs(static_cast<std::size_t>(count)), left;
  copy_memory(jobs.data(), a.jobs, jobs.size() * sizeof(Move), s);
  synchronize(s);
  const auto bytes = static_cast<std::size_t>(l.layout.bytes);
  for (Move& job : jobs) {
    const bool up = job.kind == CudaStorePlace::up || job.kind == CudaStorePlace::up_without_keys;
    if (job.kind != CudaStorePlace::leave) {
      const int to = up ? 0 : 1;
      const std::int64_t skip = job.kind == CudaStorePlace::up_without_keys ? l.layout.v : 0;
      copy_memory(l.base[to] + std::int64_t{job.to} * granule_bytes + skip,
                  l.base[1 - to] + std::int64_t{job.from} * granule_bytes + skip,
                  bytes - static_cast<std::size_t>(skip), s);
    }
    if (up || job.kind == CudaStorePlace::down) continue;
    job.kind = CudaStorePlace::leave;
    left.push_back(job);
  }
  count = static_cast<std::int32_t>(left.size());
  copy_memory(a.jobs, left.data(), left.size() * sizeof(Move), s);
  copy_memory(a.counts, &count, sizeof count, s);
  synchronize(s);
}

// The copies of an edit for this attention run in the stream, those of others beside it. Beside a step, edits of some
// layers share launches.
Applied CudaStore::place_pages(const Edit& e, const std::vector<std::int32_t>& slots) {
  if (slots.empty()) return {Fit::ok, -1};
  const Shape& s = options_.shape;
  CudaStorePlace a = place_of(e, slots);
  if (a.most == 0) return {Fit::ok, -1};
  a.spilled = spills_at_once() ? nullptr : spill_rooms_.as<std::int32_t>();
  const std::int64_t heads = std::int64_t{a.rows} * s.kv_heads;
  if (!reserved_) {
    const std::int64_t pages = (max_length(e.layer, slots) + s.page_size - 1) / s.page_size;
    if (capped(Tier::host) && !reserve(Tier::host, heads * pages)) {
      const Uncopied down = uncopied(e, slots);  // the exact free frames are known now
      const std::int64_t more = down.pages - down.owed, free = std::max<std::int64_t>(0, free_bound_[1]);
      if (down.pages > known_.free(1) || more > free) return {Fit::out_of_memory, 0};
      free_bound_[1] = free - more;
    }
    // A head's set may grow by a page. If no frame is free, pages that leave give theirs.
    if (!reserve(Tier::device, heads)) reserve_by_spilling(heads);
  }
  a.lists = take_scratch<std::int32_t>(workspace(), "place", {2 * heads * a.most}).data;
  stale_ = true;
  const CudaStoreLayer l = layer(e.layer);
  if (e.when.kind == Deadline::sequence) {
    reloads_->plan_to(a);
    only_on_cuda<cuda_store::plan_places>(l, std::vector{a}, side_->begin());  // beside the step's logits
    side_->end(SideStream::no_lane);
    return {Fit::ok, -1};
  }
  fetch_waiting();  // into places of pages that this edit may move
  takes_twice_ = takes_twice_ || !a.reuse;
  placing_[static_cast<std::size_t>(e.layer)] = true;
  const auto jobs_of = [&](int lane) {
    a.jobs = place_jobs_.as<std::int32_t>() + 4 * lane * most_pages_of_layer(s);
    a.counts = place_counts_.as<std::int32_t>() + 2 * lane;
  };
  if (beside_) {
    const bool joins = places_.size() < cuda_store::most_places &&
                       std::ranges::none_of(
                           places_, [&](const auto& other) { return other.layer == e.layer || other.rows != a.rows; });
    if (!joins) place_waiting();
    a.layer = e.layer;
    jobs_of(lane_of_beside);
    places_.push_back(a);
    if (options_.copy_by_host) place_waiting();
    return {Fit::ok, -1};
  }
  RopeTable rope = options_.rope_table;
  rope.inv_freq = inv_freq_.as<float>();  // on the device
  // Keys are made in this stream, in frames that copies under way may still read.
  if (a.keys && side_->busy()) side_->join();
  if (e.when.kind == Deadline::this_attention) {
    jobs_of(lane_of_stream);
    a.awaited = true;
    only_on_cuda<cuda_store::plan_places>(l, std::vector{a}, stream_);
    if (options_.copy_by_host) copy_placed_by_host(l, a, stream_);
    if (!a.keys) {
      only_on_cuda<cuda_store::copy_placed>(l, a, stream_);
      return {Fit::ok, -1};
    }
    only_on_cuda<cuda_store::copy_placed>(l, a, side_->begin());
    side_->end(SideStream::no_lane);
    only_on_cuda<cuda_store::rebuild_placed>(l, a, rope, stream_);
    side_->join();
    return {Fit::ok, -1};
  }
  const int lane = side_->next();
  jobs_of(lane);
  only_on_cuda<cuda_store::plan_places>(l, std::vector{a}, stream_);
  if (options_.copy_by_host) copy_placed_by_host(l, a, stream_);
  only_on_cuda<cuda_store::copy_placed>(l, a, side_->begin());
  side_->end(lane);
  if (a.keys) only_on_cuda<cuda_store::rebuild_placed>(l, a, rope, stream_);
  return {Fit::ok, -1};
}

void CudaStore::place_waiting() {
  if (places_.empty()) return;
  const std::vector<CudaStorePlace> all = std::exchange(places_, {});
  const CudaStoreLayer first = layer(0);
  const Stream s = side_->stream();
  only_on_cuda<cuda_store::plan_places>(first, all, s);
  if (options_.copy_by_host) copy_placed_by_host(first, all[0], s);
  only_on_cuda<cuda_store::copy_placed>(first, all[0], s);
}

// Reserves the frames of these heads' archives, which may take those of the archives before.
bool CudaStore::reserve_archives(const Edit& e, const std::vector<std::int32_t>& slots) {
  const Shape& s = options_.shape;
  const auto pages_of = [&](int tokens) { return std::int64_t{tokens + s.page_size - 1} / s.page_size; };
  const std::int64_t most = pages_of(max_length(e.layer, slots)) * s.kv_heads * static_cast<std::int64_t>(slots.size());
  if (reserve(Tier::host, most)) return true;
  const std::vector<std::uint8_t> meant = marked(e.heads, slots);  // the other numbers are exact now
  std::int64_t left = known_.free(1);
  for (const int slot : slots)
    for (int head = 0; head < s.kv_heads; ++head) {
      const std::size_t at = head_index(e.layer, slot, head);
      if (meant[static_cast<std::size_t>(slot * s.kv_heads + head)])
        left += pages_of(archive_lengths_[at]) - pages_of(lengths_[at]);
    }
  if (left >= 0) free_bound_[1] = left;
  return left >= 0;
}

Applied CudaStore::archive_heads(const Edit& e, const std::vector<std::int32_t>& slots) {
  if (slots.empty()) return {};
  settle();
  if (!reserve_archives(e, slots)) return {Fit::out_of_memory, 0};
  const CudaStoreRows rows{rows_of(slots), static_cast<int>(slots.size())};
  only_on_cuda<cuda_store::free_archives>(layer(e.layer), 1, e.heads, rows, stream_);
  only_on_cuda<cuda_store::archive>(layer(e.layer), e.heads, rows, stream_);
  stale_ = true;
  return {};
}

// The copies run beside the stream, by a copy of the list, which may be scratch. Beside a step, fetches of some layers
// share a launch when their edits end. So do those of layers that follow each other, by lists and heads that last,
// where observe() comes behind the last layer: nobody changes these before it.
Applied CudaStore::fetch_tokens(const Edit& e, const std::vector<std::int32_t>& slots) {
  if (slots.empty()) return {Fit::ok, -1};
  auto a = list_of<CudaStoreFetch>(e, rows_of(slots), slots.size(), ++edit_);
  a.heads = e.heads;
  a.layer = e.layer;
  stale_ = true;
  fetching_[static_cast<std::size_t>(e.layer)] = true;
  // A second fetch of a layer may replace tokens that the first one brings.
  const bool joins = std::ssize(fetches_) < most_fetches && std::ranges::none_of(fetches_, [&](const auto& other) {
                       return other.layer == a.layer || other.rows != a.rows;
                     });
  if (beside_) {
    place_waiting();  // pages that the list counts on
    if (!joins) fetch_waiting();
    fetches_.push_back(a);
    return {Fit::ok, -1};
  }
  const Heads& of = e.heads;
  const bool lasts = e.list.slots && !workspace_.is_scratch(of.flags.data) && !workspace_.is_scratch(of.steps) &&
                     !workspace_.is_scratch(of.classes);
  if (late_ && in_graph_ && lasts) {
    if (!joins) fetch_waiting();
    fetches_.push_back(a);
    const int follow = options_.shape.layers - 1 - e.layer;  // so that little travels when the last layer has ended
    if (static_cast<int>(fetches_.size()) >= std::min(layers_of_fetch, follow)) fetch_waiting();
    return {Fit::ok, -1};
  }
  const int lane = side_->next();
  const auto held = only_on_cuda<cuda_store::hold_list>(layer(e.layer), a, stream_, lane, stream_);
  only_on_cuda<cuda_store::fetch>(layer(0), std::vector{held}, side_->begin());
  side_->end(lane);
  return {Fit::ok, -1};
}

void CudaStore::fetch_waiting() {
  if (fetches_.empty()) return;
  const Stream s = beside_ ? side_->stream() : side_->begin();
  only_on_cuda<cuda_store::fetch>(layer(0), std::exchange(fetches_, {}), s);
  if (!beside_) side_->end(SideStream::no_lane);
}

Stream CudaStore::fork() {
  fetch_waiting();
  places_.clear();  // an error ended the work before
  return side_->begin();
}

void CudaStore::forked() { side_->end(SideStream::no_lane); }

// Returns the pages that a place edit copies to the host. Waits for the device.
CudaStore::Uncopied CudaStore::uncopied(const Edit& e, const std::vector<std::int32_t>& slots) {
  const Shape& s = options_.shape;
  refresh();
  const std::vector<std::uint8_t> meant = marked(e.heads, slots);
  std::vector<std::uint8_t> placed(meant.size());
  copy_memory(placed.data(), layer(e.layer).placed, placed.size(), stream_);
  synchronize(stream_);
  Uncopied out;
  for (const std::int32_t slot : slots) {
    const auto host = entries(table_[1], slot);
    for (int head = 0; head < s.kv_heads; ++head) {
      const bool on = meant[static_cast<std::size_t>(slot * s.kv_heads + head)];
      const int full = on ? lengths_[head_index(e.layer, slot, head)] / s.page_size : 0;
      const auto* of = host.data() + static_cast<std::size_t>(e.layer * s.kv_heads + head) * pages_per_head_;
      const auto missing = std::count_if(of, of + full, [](const PageEntry& x) { return x.frame == null_frame; });
      out.pages += missing;
      if (missing < full || placed[static_cast<std::size_t>(slot * s.kv_heads + head)]) out.owed += missing;
    }
  }
  return out;
}

// Returns the frames that an offload or a recall would take. Waits for the device's tables and the list.
std::int64_t CudaStore::frames_missing(const CudaStorePageEdit& e, int index,
                                       const std::vector<std::int32_t>& slots) const {
  const Shape& s = options_.shape;
  std::int64_t missing = 0;
  std::vector<std::int32_t> list;
  for (std::size_t row = 0; row < slots.size(); ++row) {
    const auto target = entries(table_[e.verb == CudaStorePageEdit::offload ? 1 : 0], slots[row]);
    for (int head = 0; head < s.kv_heads; ++head) {
      const int n = lengths_[head_index(index, slots[row], head)], pages = (n + s.page_size - 1) / s.page_size;
      const auto* of = target.data() + (static_cast<std::size_t>(index * s.kv_heads + head)) * pages_per_head_;
      if (e.verb == CudaStorePageEdit::recall_all) {
        missing += std::count_if(of, of + pages, [](const PageEntry& x) { return x.frame == null_frame; });
        continue;
      }
      std::int32_t count = 0;
      const auto r = static_cast<std::int64_t>(row);
      copy_memory(&count, &e.count(r, head), sizeof count, stream_);
      synchronize(stream_);
      count = static_cast<std::int32_t>(std::clamp<std::int64_t>(count, 0, e.index.extent[2]));
      list.resize(static_cast<std::size_t>(count));
      for (std::int32_t i = 0; i < count; ++i)
        copy_memory(&list[static_cast<std::size_t>(i)], &e.index(r, head, i), sizeof(std::int32_t), stream_);
      synchronize(stream_);
      missing += std::count_if(list.begin(), list.end(), [&](std::int32_t page) {
        return page >= 0 && page < pages && of[page].frame == null_frame;
      });
    }
  }
  return missing;
}

Fit CudaStore::launch_page_edit(CudaStorePageEdit e, int index, const std::vector<std::int32_t>& slots) {
  settle();
  const Shape& s = options_.shape;
  if (!pages_below()) return Fit::ok;  // no page ever left the device
  if (e.verb != CudaStorePageEdit::drop) {
    // In a graph the number must not depend on lengths.
    const std::int64_t pages = in_graph_ ? static_cast<std::int64_t>(pages_per_head_)
                                         : (max_length(index, slots) + s.page_size - 1) / s.page_size;
    const std::int64_t a_head = e.verb == CudaStorePageEdit::recall_all ? pages : std::min(pages, e.index.extent[2]);
    const std::int64_t most = a_head * e.rows * s.kv_heads;
    if (most == 0) return Fit::ok;
    const Tier to = e.verb == CudaStorePageEdit::offload ? Tier::host : Tier::device;
    if (in_graph_ && capped(to)) taken_.frames[static_cast<std::size_t>(to)] += most;
    if (!reserved_ && !reserve(to, most)) {
      // The counts are exact now. Frames that are owed to filled pages are these pages' own.
      const auto t = static_cast<std::size_t>(to);
      const std::int64_t missing = frames_missing(e, index, slots);
      if (missing > known_.free(t)) return Fit::out_of_memory;
      free_bound_[t] = std::min(free_bound_[t], known_.free(t) - missing);
    }
    if (!jobs_) jobs_ = StreamMemory(stream_, sizes(options_).jobs);
    e.job_count = jobs_.as<std::int32_t>();
    e.jobs = e.job_count + 4;
    zero_memory(e.job_count, sizeof(std::int32_t), stream_);
  }
  only_on_cuda<cuda_store::page_edit>(layer(index), e, stream_);
  stale_ = true;
  return Fit::ok;
}

Fit CudaStore::recall_layer(int index, int slot) {
  CudaStorePageEdit e;
  const std::vector<std::int32_t> slots{slot};
  e.slots = rows_of(slots);
  e.rows = 1;
  e.verb = CudaStorePageEdit::recall_all;
  e.edit = ++edit_;
  return launch_page_edit(e, index, slots);
}

void CudaStore::note_absent(int index, const std::vector<std::int32_t>& slots, const IndexList& pages) const {
  if (!pages_below() || reserved_ || slots.empty()) return;
  CudaStoreList a;
  a.slots = rows_of(slots);
  a.rows = static_cast<int>(slots.size());
  a.index = pages.index;
  a.count = pages.count;
  only_on_cuda<cuda_store::note_absent>(layer(index), a, stream_);
}

ops::FinalList* CudaStore::final_list() {
  run_put_off();  // a choice that waits counts by the object of before
  auto* counters = counters_.as<CudaStoreCounters>();
  final_ = {};
  final_.count = {&counters->fired, &counters->last_edit, ++edit_};
  return &final_;
}

IndexList CudaStore::attend_list(const Edit& e, const std::vector<std::int32_t>& slots, Workspace& w) {
  const Shape& s = options_.shape;
  // Where an op has chosen by final_list(), the edit has its number: it counts once.
  const bool noted = e.list.final == &final_;
  if (noted && e.verb == Edit::attend && e.pins == final_.pins &&
      final_.is(e.list, layer(e.layer).length, rows_of(slots), static_cast<int>(slots.size()))) {
    stale_ = true;
    note_absent(e.layer, slots, e.list);
    return e.list;
  }
  const std::int64_t rows = static_cast<std::int64_t>(slots.size());
  auto a = list_of<CudaStoreAttend>(e, rows_of(slots), slots.size(), noted ? final_.count.edit : ++edit_);
  a.pins = e.pins;
  a.resident = e.resident;
  a.unit = e.verb == Edit::attend ? s.page_size : 1;
  a.most = static_cast<int>(pages_per_head_) * (s.page_size / a.unit);
  // The room does not depend on lengths, so that a graph can capture it.
  const std::int64_t pinned = std::int64_t{std::max(0, e.pins.first)} + std::max(0, e.pins.last) + 2 * s.page_size;
  const std::int64_t room = a.unit == 1 ? std::min<std::int64_t>(a.most, e.list.index.extent[2] + pinned) : a.most;
  IndexList out;
  out.index = take_scratch<std::int32_t>(w, "attend", {rows, s.kv_heads, room});
  out.count = take_scratch<std::int32_t>(w, "attend", {rows, s.kv_heads});
  a.out = out.index;
  a.out_count = out.count;
  const CudaStoreLayer of = layer(e.layer);
  const auto make = [of, a, s = stream_] { only_on_cuda<cuda_store::attend>(of, a, s); };
  // Attention may make the list in its launch, and the choice in front of it.
  if (e.verb == Edit::attend && !e.resident && may_put_off()) {
    ops::ChosenRead read;
    read.list = PageList{e.list}, read.out = PageList{out}, read.pins = e.pins;
    read.fired = {&counters_.as<CudaStoreCounters>()->fired, &counters_.as<CudaStoreCounters>()->last_edit, a.edit};
    read.bad_count = store_bad_list, read.bad_entry = store_bad_attend;
    ops::put_off_list(read, make);
  } else {
    make();
  }
  stale_ = true;
  return out;
}

}  // namespace kvlab
