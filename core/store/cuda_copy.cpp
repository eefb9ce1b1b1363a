// Copies a slot of a CudaStore to the host and back, to save, restore and check it.
#include <algorithm>
#include <bit>
#include <cstring>
#include <kvlab/error.hpp>
#include <string>

#include "base/device_op.hpp"
#include "store/cpu_store.hpp"
#include "store/cuda_store.hpp"

namespace kvlab {
namespace {

// Bytes of one round trip of copy_frames.
constexpr std::size_t least_packed = std::size_t{1} << 20, most_packed = std::size_t{64} << 20;

}  // namespace

Store::Pending CudaStore::copied(const Pending& p, int slot, Stream device) const {
  const std::uint8_t* marks = p.heads ? p.heads.as<std::uint8_t>() : nullptr;
  const IndexList& list = p.edit.list;
  const std::int64_t row = p.lasts ? p.slot : 0;
  Edit edit = p.edit;
  edit.order = {};  // numbers of the slot that the row had; without them the oldest pages leave first
  return pending(edit, slot, p.due, list.index.data + row * list.index.stride[0],
                 list.count.data + row * list.count.stride[0], marks, device, stream_);
}

std::vector<PageEntry> CudaStore::entries(const StreamMemory& table, int slot) const {
  const Shape& s = options_.shape;
  const std::size_t each = static_cast<std::size_t>(s.kv_heads) * pages_per_head_;
  std::vector<PageEntry> out(each * static_cast<std::size_t>(s.layers));
  for (int l = 0; l < s.layers; ++l)
    copy_memory(out.data() + static_cast<std::size_t>(l) * each, table.as<PageEntry>() + slot_index(l, slot),
                each * sizeof(PageEntry), stream_);
  synchronize(stream_);
  return out;
}

void CudaStore::copy_frames(const std::vector<HostFrame>& frames, bool to_host) const {
  if (frames.empty()) return;
  std::size_t all = 0, largest = 0;
  for (const HostFrame& f : frames) {
    const auto bytes = static_cast<std::size_t>(f.granules * granule_bytes);
    all += bytes, largest = std::max(largest, bytes);
  }
  const std::size_t wanted = std::bit_ceil(std::clamp(all, least_packed, most_packed));
  if (packed_.bytes() < wanted) packed_.reserve(wanted);
  const bool packs = packed_.bytes() >= largest;
  const auto most = static_cast<std::int64_t>(packed_.bytes()) / granule_bytes;
  std::byte* device = device_frames();
  if (!packs) {
    for (const HostFrame& f : frames) {
      std::byte* frame = device + std::int64_t{f.frame} * granule_bytes;
      copy_memory(to_host ? f.host : frame, to_host ? frame : f.host, f.granules * granule_bytes, stream_);
    }
    synchronize(stream_);
    return;
  }
  std::vector<CudaStorePacking> jobs;
  for (std::size_t begin = 0; begin < frames.size(); begin += jobs.size()) {
    jobs.clear();
    std::int64_t at = 0;
    for (std::size_t i = begin; i < frames.size() && at + frames[i].granules <= most; ++i) {
      jobs.push_back({frames[i].frame, frames[i].granules, static_cast<std::int32_t>(at)});
      at += frames[i].granules;
    }
    const auto count = static_cast<std::int64_t>(jobs.size());
    const auto on_host = [&] {
#pragma omp parallel for schedule(static)
      for (std::int64_t i = 0; i < count; ++i) {
        const CudaStorePacking& job = jobs[static_cast<std::size_t>(i)];
        std::byte *copy = packed_.data() + job.at * granule_bytes,
                  *host = frames[begin + static_cast<std::size_t>(i)].host;
        std::memcpy(to_host ? host : copy, to_host ? copy : host,
                    static_cast<std::size_t>(job.granules * granule_bytes));
      }
    };
    if (!to_host) on_host();
    const std::size_t bytes = jobs.size() * sizeof jobs[0];
    if (packing_.bytes() < bytes) packing_ = StreamMemory(stream_, 2 * bytes);
    copy_memory(packing_.as<>(), jobs.data(), bytes, stream_);
    only_on_cuda<cuda_store::pack>(packing_.as<CudaStorePacking>(), static_cast<int>(count), device, packed_.data(),
                                   to_host, stream_);
    synchronize(stream_);
    if (to_host) on_host();
  }
}

std::shared_ptr<CpuStore> CudaStore::copy_of(int slot) const {
  const Shape& s = options_.shape;
  all_reloaded();
  refresh();
  auto out = CpuStore::for_one_slot(options_, workspace_.slot_bytes());
  if (workspace_.slot_bytes() > 0) {
    std::vector<std::byte> state(workspace_.slot_bytes());
    workspace_.save_slot(slot, state.data());
    out->workspace_.load_slot(0, state.data());
  }
  out->used_[0] = used_[static_cast<std::size_t>(slot)];
  out->position_[0] = position(slot);
  out->step_[0] = steps(slot);
  out->set_spill_state(0, spill_state(slot));
  const std::vector<PageEntry> tables[] = {entries(table_[0], slot), entries(table_[1], slot)};
  const std::vector<PageEntry> archive = options_.archive ? entries(archive_, slot) : std::vector<PageEntry>();
  std::vector<HostFrame> of_device;
  const auto copy_frame = [&](Tier tier, const PageEntry& e, const PageEntry& copy) {
    const std::int64_t bytes = layout_of(static_cast<int>(tier), e).bytes;
    std::byte* to = out->arena(tier).at(copy.frame);
    if (tier == Tier::device)
      of_device.push_back({e.frame, static_cast<std::int32_t>(bytes / granule_bytes), to});
    else
      copy_memory(to, host_arena_.data() + std::int64_t{e.frame} * granule_bytes, static_cast<std::size_t>(bytes),
                  stream_);
  };
  for (int l = 0; l < s.layers; ++l)
    for (int head = 0; head < s.kv_heads; ++head) {
      const std::size_t at = static_cast<std::size_t>(l * s.kv_heads + head) * pages_per_head_;
      const int n = lengths_[head_index(l, slot, head)], pages = (n + s.page_size - 1) / s.page_size;
      out->lengths_[out->head_index(l, 0, head)] = n;
      std::int32_t& lower = out->lower_pages_[out->head_index(l, 0, head)];
      if (summary_bytes_ && pages > 0) {
        const auto bytes = static_cast<std::size_t>(pages * summary_bytes_);
        const std::size_t from = head_index(l, slot, head) * pages_per_head_ * static_cast<std::size_t>(summary_bytes_);
        copy_memory(out->summary_at(l, 0, head, 0), summary_pool_.as<>() + from, bytes, stream_);
        out->ledger_.hold(Tier::device, Tag::summaries, static_cast<std::int64_t>(bytes));
      }
      for (std::size_t page = 0; page < pages_per_head_; ++page)
        for (int t = 0; t < 2; ++t) {
          const PageEntry& e = tables[t][at + page];
          if (e.frame == null_frame) continue;
          const Tier tier = static_cast<Tier>(t);
          PageEntry& copy = out->entries(tier, l, 0, head)[page];
          if (!out->take(tier, copy, e.codec)) throw Error(Errc::internal, "a copy of a slot does not fit");
          copy.tokens = e.tokens;
          copy.packed = e.packed;
          lower += e.codec > 0;
          copy_frame(tier, e, copy);
        }
      if (const int tokens = archived(l, slot, head); tokens > 0) {
        if (!out->take_archive(l, 0, head, tokens)) throw Error(Errc::internal, "a copy of a slot does not fit");
        for (std::size_t page = 0; static_cast<int>(page) * s.page_size < tokens; ++page) {
          if (archive[at + page].frame == null_frame) throw Error(Errc::internal, "store: an archive lacks a page");
          copy_frame(Tier::host, archive[at + page], out->archive_entries(l, 0, head)[page]);
        }
      }
    }
  for (const Pending& p : pending_) {
    if (p.slot != slot) continue;
    out->pending_.push_back(copied(p, 0, out->stream_));
  }
  copy_frames(of_device, true);
  synchronize(stream_);
  return out;
}

std::vector<std::byte> CudaStore::save(int slot) const { return copy_of(slot)->save(0); }

Fit CudaStore::restore(int slot, const std::vector<std::byte>& snapshot) {
  close(slot);
  used_[static_cast<std::size_t>(slot)] = true;
  const auto from = CpuStore::for_one_slot(options_, workspace_.slot_bytes());
  from->load(0, snapshot, false);
  from->await_reloads({0});  // a CPU's row that waited; here no step would wait for it
  return copy_in(*from, slot);
}

Store::Aside CudaStore::set_aside(int slot) const { return copy_of(slot); }

Fit CudaStore::bring_back(int slot, const Aside& cache) {
  close(slot);
  used_[static_cast<std::size_t>(slot)] = true;
  return copy_in(static_cast<const CpuStore&>(*cache), slot);
}

std::vector<std::int32_t> CudaStore::next_frames(std::size_t pool, std::int64_t count) const {
  std::vector<std::int32_t> out(static_cast<std::size_t>(count));
  const auto places = static_cast<std::size_t>(places_of(pool));
  for (std::size_t done = 0; done < out.size();) {  // from the list's start, and after its end from its first place on
    const std::size_t at = (static_cast<std::size_t>(known_.taken[pool]) + done) % places,
                      here = std::min(out.size() - done, places - at);
    copy_memory(out.data() + done, free_[pool].as<std::int32_t>() + at, here * sizeof(std::int32_t), stream_);
    done += here;
  }
  synchronize(stream_);
  return out;
}

Fit CudaStore::copy_in(const CpuStore& from, int slot) {
  const Shape& s = options_.shape;
  const std::size_t each = static_cast<std::size_t>(s.kv_heads) * pages_per_head_;
  Frames needed = {};
  for (int t = 0; t < 2; ++t)
    for (const PageEntry& e : from.table_[t]) needed[pool_of(t, e)] += e.frame != null_frame;
  for (const PageEntry& e : from.archive_) needed[host_pool] += e.frame != null_frame;
  if (needed[host_pool] > 0 && !open_host_tier()) return Fit::out_of_memory;
  tails_stay_ = tails_stay_ && !from.has_tail_below(0);
  stale_ = true;
  while (!reserve(needed)) {
    const bool below = needed[host_pool] > 0 && free_bound_[host_pool] < needed[host_pool];
    if (below || !spill_one()) return Fit::out_of_memory;  // others may have pages to spare
  }
  stale_ = true;
  update();
  if (two_codecs()) note_lowered(0, in_all_layers({slot}));

  auto* counters = counters_.as<CudaStoreCounters>();
  std::vector<std::int32_t> frames[pools];
  for (std::size_t pool = 0; pool < pools; ++pool) {
    frames[pool] = next_frames(pool, needed[pool]);
    known_.taken[pool] += static_cast<std::int32_t>(needed[pool]);
    copy_memory(&counters->taken[pool], &known_.taken[pool], sizeof known_.taken[pool], stream_);
  }
  std::vector<HostFrame> of_device;
  const auto copy_table = [&](int t, std::vector<PageEntry> table, const StreamMemory& to) {
    for (PageEntry& e : table) {
      if (e.frame == null_frame) continue;
      auto& of_pool = frames[pool_of(t, e)];
      const std::byte* source = from.arena(static_cast<Tier>(t)).at(e.frame);
      const std::int64_t bytes = layout_of(t, e).bytes;
      e.frame = of_pool.back();
      of_pool.pop_back();
      if (t == 0)
        of_device.push_back(
            {e.frame, static_cast<std::int32_t>(bytes / granule_bytes), const_cast<std::byte*>(source)});
      else
        copy_memory(host_arena_.data() + std::int64_t{e.frame} * granule_bytes, source, static_cast<std::size_t>(bytes),
                    stream_);
    }
    for (int l = 0; l < s.layers; ++l)
      copy_memory(to.as<PageEntry>() + slot_index(l, slot), table.data() + static_cast<std::size_t>(l) * each,
                  each * sizeof(PageEntry), stream_);
  };
  for (int t = 0; t < 2; ++t) {
    copy_table(t, from.table_[t], table_[t]);
    if (t == 1 && options_.archive) copy_table(t, from.archive_, archive_);
  }
  std::int32_t pages = known_.pages;
  for (int l = 0; l < s.layers; ++l) {
    const auto* lengths = from.lengths_.data() + from.head_index(l, 0, 0);
    copy_memory(length_.as<std::int32_t>() + head_index(l, slot, 0), lengths,
                static_cast<std::size_t>(s.kv_heads) * sizeof(std::int32_t), stream_);
    if (two_codecs())
      copy_memory(lower_pages_.as<std::int32_t>() + head_index(l, slot, 0),
                  from.lower_pages_.data() + from.head_index(l, 0, 0),
                  static_cast<std::size_t>(s.kv_heads) * sizeof(std::int32_t), stream_);
    if (options_.archive)
      copy_memory(archived_.as<std::int32_t>() + head_index(l, slot, 0),
                  from.archived_.data() + from.head_index(l, 0, 0),
                  static_cast<std::size_t>(s.kv_heads) * sizeof(std::int32_t), stream_);
    if (!summary_bytes_) continue;
    const auto row = static_cast<std::size_t>(summary_bytes_);
    copy_memory(summary_pool_.as<>() + slot_index(l, slot) * row,
                from.summary_pool_.data() + from.head_index(l, 0, 0) * pages_per_head_ * row, each * row, stream_);
    for (int head = 0; head < s.kv_heads; ++head) pages += (lengths[head] + s.page_size - 1) / s.page_size;
  }
  copy_memory(&counters->pages, &pages, sizeof pages, stream_);
  note_brought(slot);
  position_[static_cast<std::size_t>(slot)] = from.position(0);
  step_[static_cast<std::size_t>(slot)] = from.steps(0);
  if (workspace_.slot_bytes() > 0) {
    std::vector<std::byte> state(workspace_.slot_bytes());
    from.workspace_.save_slot(0, state.data());
    workspace_.load_slot(slot, state.data());
  }
  for (const Pending& p : from.pending_) pending_.push_back(copied(p, slot, stream_));
  set_spill_state(slot, from.spill_state(0));
  for (int l = 0; spare_counts_ && l < s.layers; ++l)
    copy_memory(spare_counts_.as<Spare>() + layer_slot(l, slot), &spare_[layer_slot(l, slot)], sizeof(Spare), stream_);
  resume_spilling(slot, from.has_pages_below(0));
  copy_frames(of_device, false);
  synchronize(stream_);  // the copies read `from`, which the caller may free
  stale_ = true;
  update();
  return Fit::ok;
}

std::vector<std::int32_t> CudaStore::positions_by_place(int index, int slot, int head) const {
  all_reloaded();
  std::vector<std::int32_t> out(static_cast<std::size_t>(length(index, slot, head)));
  const std::size_t bytes = out.size() * sizeof(std::int32_t);
  if (bytes == 0) return out;
  if (positions_.bytes() < bytes)
    positions_ = StreamMemory(
        stream_, pages_per_head_ * static_cast<std::size_t>(options_.shape.page_size) * sizeof(std::int32_t));
  only_on_cuda<cuda_store::positions>(layer(index), slot, head, static_cast<int>(out.size()),
                                      positions_.as<std::int32_t>(), stream_);
  copy_memory(out.data(), positions_.as<>(), bytes, stream_);
  synchronize(stream_);
  return out;
}

void CudaStore::by_place(int index, std::span<const std::int32_t> slots, View<const float, 3> of,
                         View<float, 3> out) const {
  all_reloaded();
  for (std::size_t row = 0; row < slots.size(); ++row)
    only_on_cuda<cuda_store::by_place>(layer(index), slots[row], of, out, static_cast<std::int64_t>(row), stream_);
}

void CudaStore::check_invariants() const {
  const Shape& s = options_.shape;
  const auto fail = [](const std::string& what) { throw Error(Errc::internal, "store: " + what); };
  all_reloaded();
  refresh();
  std::int64_t pages = 0;
  std::vector<std::int32_t> seen[pools];
  const auto mark = [&](std::size_t pool, std::int32_t frame) {
    const auto step = static_cast<std::int32_t>(layout_of(pool).bytes / granule_bytes);
    std::int32_t in_extent = frame;
    if (pool != host_pool && two_codecs()) {
      const auto granules = static_cast<std::int32_t>(extents_.bytes / granule_bytes);
      if (frame < 0 || static_cast<std::size_t>(frame / granules) >= extents_.owner.size() ||
          extents_.owner[static_cast<std::size_t>(frame / granules)] != static_cast<std::int8_t>(pool))
        fail("a frame of another pool's extent");
      in_extent = frame % granules;
      if (in_extent / step >= extents_.each[pool]) fail("a frame beyond its extent");
    } else if (frame < 0 || frame / step >= capacity_[pool]) {
      fail("a frame that is none");
    }
    if (in_extent % step != 0) fail("a frame that is none");
    seen[pool].push_back(frame);
  };
  for (std::size_t t = 0; t < pools; ++t) {
    if (known_.taken[t] < 0 || known_.free(t) < 0 || known_.free(t) > capacity_[t])
      fail("a pool of an impossible count");
    for (const std::int32_t frame : next_frames(t, known_.free(t))) mark(t, frame);
  }
  for (int slot = 0; slot < s.max_slots; ++slot) {
    const auto mark_all = [&](int tier, const StreamMemory& table) {
      for (const PageEntry& e : entries(table, slot))
        if (e.frame != null_frame) mark(pool_of(tier, e), e.frame);
    };
    for (int t = 0; t < 2; ++t) mark_all(t, table_[t]);
    if (options_.archive) mark_all(1, archive_);
    for (int l = 0; l < s.layers; ++l)
      for (int head = 0; head < s.kv_heads; ++head) {
        const int n = lengths_[head_index(l, slot, head)];
        if (n > 0 && !used_[static_cast<std::size_t>(slot)]) fail("a closed slot holds tokens");
        if (archived(l, slot, head) > 0 && !used_[static_cast<std::size_t>(slot)]) fail("a closed slot has an archive");
        pages += (n + s.page_size - 1) / s.page_size;
      }
    copy_of(slot)->check_invariants();
  }
  for (std::size_t t = 0; t < pools; ++t) {
    std::sort(seen[t].begin(), seen[t].end());
    if (std::adjacent_find(seen[t].begin(), seen[t].end()) != seen[t].end()) fail("a frame in two places");
    if (static_cast<std::int64_t>(seen[t].size()) != capacity_[t]) fail("a frame is lost");
  }
  if (summary_bytes_ && pages != known_.pages) fail("the count of summaries differs from the pages");
}

}  // namespace kvlab
