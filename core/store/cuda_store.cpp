#include "store/cuda_store.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <kvlab/error.hpp>
#include <limits>
#include <string>

#include "base/backend.hpp"
#include "base/device_op.hpp"
#include "ops/page/causal.hpp"
#include "ops/page/paged.hpp"
#include "store/arena.hpp"
#include "store/cuda_unused.hpp"
#include "store/host_tier.hpp"

namespace kvlab {
namespace {

const CudaBackend& backend() { return require_cuda("the cache on CUDA"); }

[[noreturn]] void refuse(const std::string& what) { throw Error(Errc::unsupported, what, "the cache on CUDA"); }

}  // namespace

CudaStore::Pinned::~Pinned() {
  if (data_) backend().runtime.free_pinned(data_);
}

bool CudaStore::Pinned::reserve(std::size_t bytes) {
  const CudaRuntime& r = backend().runtime;
  auto* const more = static_cast<std::byte*>(r.allocate_pinned(bytes + static_cast<std::size_t>(before_frames)));
  if (!more) return false;
  if (data_) r.free_pinned(data_);
  data_ = more, bytes_ = bytes;
  return true;
}

void CudaStore::check(const StoreOptions& o) {
  constexpr std::size_t most_columns = 5;  // a kernel moves 8 fields per token, and 3 are position and metadata of K, V
  check_codecs(o);
  if (o.token_state.size() > most_columns)
    refuse("got " + std::to_string(o.token_state.size()) + " columns of token state, wanted at most 5");
  for (const CodecSpec& codec : o.codecs) frame_layout(o, codec);
  frame_layout(o, o.host_codec);
}

CudaStore::CudaStore(const StoreOptions& options, Stream stream) : Store(options, stream) {
  check(options);
  const Shape& s = options_.shape;
  layouts_[0] = frame_layout(options_, options_.codecs[0]);
  if (two_codecs()) layouts_[1] = frame_layout(options_, options_.codecs[1]);
  host_layout_ = frame_layout(options_, options_.host_codec);
  heads_ = std::int64_t{s.layers} * s.max_slots * s.kv_heads;
  const Sizes taken = sizes(options);
  const std::size_t heads = static_cast<std::size_t>(heads_);
  for (auto& t : table_) t = empty_table(taken.table);
  length_ = StreamMemory(stream_, taken.lengths);
  zero_memory(length_.as<>(), length_.bytes(), stream_);
  if (two_codecs()) {
    lower_pages_ = StreamMemory(stream_, taken.lower_pages);
    zero_memory(lower_pages_.as<>(), lower_pages_.bytes(), stream_);
    lowered_.resize(static_cast<std::size_t>(s.layers * s.max_slots));
  }
  if (options_.archive) {
    archive_ = empty_table(taken.archive);
    archived_ = StreamMemory(stream_, taken.archived);
    zero_memory(archived_.as<>(), archived_.bytes(), stream_);
    archive_lengths_.resize(heads);
    fetching_.resize(static_cast<std::size_t>(s.layers));
  }
  ledger_.hold(
      Tier::device, Tag::tables,
      static_cast<std::int64_t>(2 * taken.table + taken.lengths + taken.lower_pages + taken.archive + taken.archived));
  counters_ = StreamMemory(stream_, taken.counters);
  zero_memory(counters_.as<>(), counters_.bytes(), stream_);
  const std::size_t slots = static_cast<std::size_t>(s.max_slots);
  rows_ = StreamMemory(stream_, taken.rows);
  rows_known_.resize(slots + 1);
  if (options_.all_layers) {
    all_rows_ = StreamMemory(stream_, taken.all_rows);
    all_rows_known_.resize(slots + 1);
  }
  summary_pool_ = StreamMemory(stream_, taken.summaries);
  inv_freq_ = StreamMemory(stream_, taken.inv_freq);
  copy_memory(inv_freq_.as<>(), options_.rope_table.inv_freq, taken.inv_freq, stream_);
  if (options_.rope == RopeRegime::re_rotate && !inv_freq_)
    throw Error(Errc::internal, "got rope re_rotate without its frequencies", "the cache on CUDA");
  lengths_.resize(heads);
  bound_.resize(static_cast<std::size_t>(s.layers) * slots);

  std::int64_t frames = heads_ * s.max_pages();
  if (options_.device_limit >= 0) frames = std::min(frames, options_.device_limit / layouts_[0].bytes);
  const auto room = static_cast<double>(backend().runtime.free_bytes()) * 0.85;
  frames = std::min(frames, static_cast<std::int64_t>(room / static_cast<double>(layouts_[0].bytes)));
  std::int64_t bytes = std::max({frames * layouts_[0].bytes, layouts_[0].bytes, host_layout_.bytes});
  if (two_codecs() && options_.device_limit < 0)
    bytes = std::min(bytes + room_for_codecs(), std::max(bytes, static_cast<std::int64_t>(room)));
  if (two_codecs()) bytes = make_extents(bytes);
  arena_ = StreamMemory(stream_, static_cast<std::size_t>(before_frames + bytes));
  if (poison_frames()) backend().runtime.fill(arena_.as<>(), poison_byte, arena_.bytes(), stream_.handle());
  if (!two_codecs()) make_pool(device_pool, frames, frames);
  side_ = std::make_unique<SideStream>(stream_);
  if (options_.host_pages) prepare_places(taken);
  if (takes_host_tier(options_) && !open_host_tier())
    throw Error(Errc::config, "got no pinned memory for the pages on the host, wanted " +
                                  std::to_string(host_frames() * host_layout_.bytes) +
                                  " bytes; give host_memory or fewer tokens and sequences");
  synchronize(stream_);
}

// A null entry is not all zeros, so the host writes a table once.
StreamMemory CudaStore::empty_table(std::size_t bytes) const {
  StreamMemory table(stream_, bytes);
  const std::size_t all = bytes / sizeof(PageEntry);
  const std::vector<PageEntry> empty(std::min<std::size_t>(all, 65536));
  for (std::size_t at = 0; at < all; at += empty.size())
    copy_memory(table.as<PageEntry>() + at, empty.data(), std::min(empty.size(), all - at) * sizeof(PageEntry),
                stream_);
  synchronize(stream_);
  return table;
}

CudaStore::~CudaStore() {
  try {
    synchronize(stream_);  // kernels may still use the memory that is freed next
  } catch (...) {          // the next call that waits for the device throws the error
  }
}

CudaStore::Sizes CudaStore::sizes(const StoreOptions& o) {
  const Shape& s = o.shape;
  const auto n = [](std::int64_t count) { return static_cast<std::size_t>(count); };
  const std::size_t word = sizeof(std::int32_t), slots = n(s.max_slots), heads = slots * n(s.layers) * n(s.kv_heads),
                    pages = heads * n(s.max_pages()), of_layer = n(most_pages_of_layer(s));
  Sizes out;
  out.table = pages * sizeof(PageEntry);
  out.lengths = heads * word;
  out.lower_pages = o.codecs.size() > 1 ? out.lengths : 0;
  out.rows = slots * (slots + 1) / 2 * word;
  out.all_rows = o.all_layers ? n(s.layers) * out.rows : 0;
  out.counters =
      sizeof(CudaStoreCounters) + n(s.layers * (o.host_pages ? 2 : 1)) * sizeof(CudaStoreCounters::last_edit);
  out.inv_freq = o.rope_table.inv_freq ? n(s.head_dim / 2) * sizeof(float) : 0;
  out.jobs = (4 + 4 * of_layer) * word;
  out.summaries = pages * n(summary_bytes(o));
  if (o.archive) out.archive = out.table, out.archived = out.lengths;
  if (!o.host_pages) return out;
  out.place_jobs = 4 * (lane_of_beside + cuda_store::most_places) * of_layer * word;
  out.place_counts = 2 * (lane_of_beside + 1) * word;
  if (o.rebuilds_keys) out.rebuilds = of_layer * sizeof(CudaStorePlace::Rebuild) + 2 * word;
  out.placed_flags = heads;
  out.spilled = slots * word;
  out.spare_counts = n(s.layers) * slots * sizeof(Spare);
  if (o.pauses) out.reloads = Reloads::bytes(s.layers * most_pages_of_layer(s), s.max_slots);
  return out;
}

StoreBytes CudaStore::bytes(const StoreOptions& o) {
  const Sizes s = sizes(o);
  std::int64_t host_frames = static_cast<std::int64_t>(s.table / sizeof(PageEntry));
  if (o.host_limit >= 0) host_frames = std::min(host_frames, o.host_limit / frame_layout(o, o.host_codec).bytes);
  constexpr std::int64_t place = sizeof(std::int32_t);  // of a frame's number in a list
  const std::int64_t frame = frame_layout(o, o.codecs[0]).bytes;
  std::int64_t places = o.host_pages ? 2 : 1;
  // A place in the list of each codec and in that of reclaim, and what an extent has.
  if (o.codecs.size() > 1) places = 3 + 2 * (frame / frame_layout(o, o.codecs[1]).bytes + 1);
  const std::size_t lists =
      s.jobs + s.place_jobs + s.place_counts + s.rebuilds + s.placed_flags + s.spilled + s.spare_counts + s.reloads;
  return {static_cast<std::int64_t>(2 * s.table + s.lengths + s.lower_pages + s.archive + s.archived + s.counters +
                                    s.rows + s.all_rows + s.inv_freq + lists) +
              (host_frames + 2) * place + before_frames,
          static_cast<std::int64_t>(s.summaries), frame, places * place};
}

void CudaStore::prepare_places(const Sizes& taken) {
  const auto zeros = [&](std::size_t n) {
    StreamMemory m(stream_, n);
    zero_memory(m.as<>(), n, stream_);
    return m;
  };
  place_jobs_ = StreamMemory(stream_, taken.place_jobs);
  place_counts_ = zeros(taken.place_counts);
  if (taken.rebuilds) {
    rebuilds_ = StreamMemory(stream_, taken.rebuilds - 2 * sizeof(std::int32_t));
    rebuild_counts_ = zeros(2 * sizeof(std::int32_t));
  }
  returned_ = zeros(static_cast<std::size_t>(1 + capacity_[0]) * sizeof(std::int32_t));
  placed_flags_ = zeros(taken.placed_flags);
  spill_rooms_ = zeros(taken.spilled);
  spare_counts_ = zeros(taken.spare_counts);
  placing_.resize(static_cast<std::size_t>(options_.shape.layers));
  const Shape& s = options_.shape;
  if (options_.pauses) reloads_ = std::make_unique<Reloads>(stream_, s.layers * most_pages_of_layer(s), s.max_slots);
  ledger_.hold(Tier::device, Tag::workspace,
               static_cast<std::int64_t>(place_jobs_.bytes() + returned_.bytes() + taken.rebuilds + taken.reloads));
}

void CudaStore::make_pool(CudaPool pool, std::int64_t frames, std::int64_t places) {
  const auto t = static_cast<std::size_t>(pool);
  const std::int64_t step = layout_of(t).bytes / granule_bytes;
  frames = std::min<std::int64_t>(frames, std::numeric_limits<std::int32_t>::max() / step);
  std::vector<std::int32_t> numbers(static_cast<std::size_t>(frames));
  for (std::int64_t i = 0; i < frames; ++i) numbers[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i * step);
  free_[t] = StreamMemory(stream_, static_cast<std::size_t>(std::max<std::int64_t>(1, places)) * sizeof(std::int32_t));
  copy_memory(free_[t].as<>(), numbers.data(), numbers.size() * sizeof(std::int32_t), stream_);
  capacity_[t] = frames;
  known_.frames[t] = static_cast<std::int32_t>(frames);
  known_.taken[t] = places_of(t);
  known_.given[t] = known_.taken[t] + known_.frames[t];
  copy_memory(&counters_.as<CudaStoreCounters>()->taken[t], &known_.taken[t], sizeof known_.taken[t], stream_);
  copy_memory(&counters_.as<CudaStoreCounters>()->given[t], &known_.given[t], sizeof known_.given[t], stream_);
  copy_memory(&counters_.as<CudaStoreCounters>()->frames[t], &known_.frames[t], sizeof known_.frames[t], stream_);
  synchronize(stream_);
  free_bound_[t] = frames;
}

std::int64_t CudaStore::host_frames() const {
  return std::min(heads_ * options_.shape.max_pages(), host_tier_limit(options_) / host_layout_.bytes);
}

// Pinning memory takes half a second per GiB. Unless the options ask for the tier at the start, the first offload does
// it.
bool CudaStore::open_host_tier() {
  if (host_arena_.data()) return true;
  std::int64_t frames = host_frames();
  if (takes_host_tier(options_) || frames > 0) check_host_tier(options_);
  // A run that asked for the tier at its start gets all of it or an error.
  const int attempts = takes_host_tier(options_) ? 1 : 6;
  for (int attempt = 0; attempt < attempts && frames > 0; ++attempt, frames /= 2)
    if (host_arena_.reserve(static_cast<std::size_t>(frames * host_layout_.bytes))) {
      if (poison_frames())
        std::memset(host_arena_.data(), poison_byte, static_cast<std::size_t>(frames * host_layout_.bytes));
      make_pool(host_pool, frames, frames);
      return true;
    }
  return false;
}

CudaStoreLayer CudaStore::layer(int index) const {
  CudaStoreLayer l;
  const std::size_t head = head_index(index, 0, 0), entry = head * pages_per_head_;
  auto* counters = counters_.as<CudaStoreCounters>();
  l.base[0] = device_frames();
  l.base[1] = host_arena_.data();
  for (int t = 0; t < 2; ++t) {
    l.table[t] = table_[t].as<PageEntry>() + entry;
  }
  for (std::size_t t = 0; t < pools; ++t)
    l.pool[t] = {free_[t].as<std::int32_t>(), &counters->taken[t], &counters->given[t], places_of(t)};
  if (lower_pages_) l.lower_pages = lower_pages_.as<std::int32_t>() + head;
  l.length = length_.as<std::int32_t>() + head;
  l.summary = options_.summary;
  l.summary_bits = options_.summary_bits;
  l.summary_bytes = summary_bytes_;
  if (summary_bytes_) l.summaries = summary_pool_.as<>() + entry * static_cast<std::size_t>(summary_bytes_);
  l.layout = layouts_[0];
  l.host_layout = host_layout_;
  l.lower_layout = layouts_[1];
  l.mixed = !options_.codecs[0].stores_as(options_.host_codec) || two_codecs();
  l.packs = packs();
  l.host_entries = table_[1].as<PageEntry>();
  if (options_.rope == RopeRegime::re_rotate) l.inv_freq = inv_freq_.as<float>();
  l.kv_heads = options_.shape.kv_heads;
  l.pages = static_cast<int>(pages_per_head_);
  l.heads_per_layer = std::int64_t{options_.shape.max_slots} * options_.shape.kv_heads;
  l.counters = counters;
  if (archive_) l.archive = archive_.as<PageEntry>() + entry, l.archived = archived_.as<std::int32_t>() + head;
  if (placed_flags_) l.placed = placed_flags_.as<std::uint8_t>() + head;
  if (returned_) l.returned_count = returned_.as<std::int32_t>(), l.returned = l.returned_count + 1;
  l.poison = poison_frames();
  return l;
}

// All lists of n slots use one place in rows_, so that a captured graph finds the rows of its batch there.
const std::int32_t* CudaStore::rows_of(const std::vector<std::int32_t>& slots) const {
  const std::size_t n = slots.size(), layers = static_cast<std::size_t>(options_.shape.layers);
  const bool all = n > 0 && slots.back() >= options_.shape.max_slots;  // of all layers
  const std::size_t each = all ? n / layers : n;
  auto& known = all ? all_rows_known_ : rows_known_;
  if (each >= known.size()) throw Error(Errc::internal, "got more rows than the store has slots");
  std::int32_t* to =
      (all ? all_rows_ : rows_).as<std::int32_t>() + (all ? layers : 1) * (each * (each - (each > 0)) / 2);
  if (known[each] != slots) {
    copy_memory(to, slots.data(), n * sizeof(std::int32_t), stream_);
    known[each] = slots;
  }
  return to;
}

PagedKv CudaStore::view(int index, const std::vector<std::int32_t>& slots, Tier tier) const {
  const CudaStoreLayer l = layer(index);
  PagedKv kv = paged(l.table[static_cast<int>(tier)], l.length, lowered(index, slots) ? l.lower_pages : nullptr,
                     rows_of(slots), slots.size());
  kv.base = l.base[static_cast<int>(tier)];
  if (!kv.base) kv.base = l.base[0];  // no page has a frame in this tier
  kv.error = &l.counters->error;
  kv.layouts = tier == Tier::host ? &host_layout_ : layouts_;
  kv.rope_table.inv_freq = inv_freq_.as<float>();
  return kv;
}

PagedKv CudaStore::view_all(const std::vector<std::int32_t>& slots) const {
  const std::vector<std::int32_t> all = in_all_layers(slots);
  const CudaStoreLayer first = layer(0);
  PagedKv kv = paged(first.table[0], first.length, lowered(0, all) ? first.lower_pages : nullptr, rows_of(all),
                     all.size(), options_.shape.layers);
  kv.base = first.base[0];
  kv.error = &first.counters->error;
  kv.layouts = layouts_;
  kv.rope_table.inv_freq = inv_freq_.as<float>();
  return kv;
}

PagedKv CudaStore::causal_view(int index, int slot, int tokens, std::int32_t* length, std::int32_t* rows) const {
  const Shape& s = options_.shape;
  PagedKv kv = view(index, {slot});
  ops::causal(kv.length.data + std::int64_t{slot} * s.kv_heads, s.kv_heads, tokens, length, rows, stream_);
  kv.table.data += kv.table.stride[0] * slot;
  kv.table.extent[0] = tokens;
  kv.table.stride[0] = 0;
  if (kv.lower_pages) {
    kv.lower_pages.data += kv.lower_pages.stride[0] * slot;
    kv.lower_pages.extent[0] = tokens;
    kv.lower_pages.stride[0] = 0;
  }
  kv.length = View<const std::int32_t, 2>::dense(length, {tokens, s.kv_heads});
  kv.slots = rows;
  kv.rows = tokens;
  return kv;
}

Summaries CudaStore::summaries(int index) const { return summaries_at(layer(index).summaries); }

int CudaStore::length(int index, int slot, int head) const {
  refresh();
  return lengths_[head_index(index, slot, head)];
}

int CudaStore::archived(int index, int slot, int head) const {
  if (!options_.archive) return 0;
  refresh();
  return archive_lengths_[head_index(index, slot, head)];
}

int CudaStore::max_length(int index, const std::vector<std::int32_t>& slots) const {
  int longest = 0;
  for (int slot : slots) longest = std::max(longest, bound_[layer_slot(index, slot)]);
  return longest;
}

void CudaStore::settle() {
  fetch_waiting();
  if (beside_) synchronize(side_->stream());
  side_->join();
  fetching_.assign(fetching_.size(), false);
  if (std::find(placing_.begin(), placing_.end(), true) == placing_.end()) return;
  only_on_cuda<cuda_store::take_back>(layer(0), stream_);
  placing_.assign(placing_.size(), false);
  takes_twice_ = false;
}

void CudaStore::note_reloads() {
  if (!reloads_) return;
  settle();
  reloads_->note();
}

// Frames that copies give back make the host's numbers stale.
void CudaStore::start_reloads() {
  if (!reloads_) return;
  settle();
  stale_ = reloads_->start(layer(0)) || stale_;
}

// Copies that have ended give frames back in the main stream. No plan may take some beside that.
void CudaStore::collect_reloads() {
  settle();
  stale_ = reloads_->collect(layer(0)) || stale_;
}

bool CudaStore::reloading(int slot) {
  if (!reloads_) return false;
  collect_reloads();
  return reloads_->under_way(slot);
}

Fit CudaStore::await_reloads(const std::vector<std::int32_t>& slots) {
  if (reloads_) {
    settle();
    stale_ = reloads_->await(layer(0), slots) || stale_;
  }
  return Fit::ok;
}

bool CudaStore::all_reloaded() const {
  if (!reloads_) return false;
  auto& self = const_cast<CudaStore&>(*this);
  self.start_reloads();
  const bool some = reloads_->await_all(layer(0));
  self.stale_ = some || self.stale_;
  return some;
}

// A place edit may bring more pages than leave, and take frames that an append behind it needs.
bool CudaStore::appends_share_frames() const { return options_.host_pages && capped(Tier::device); }

int CudaStore::missing_frame() const {
  return appends_share_frames() ? store_no_room | store_no_frame | ops::append_no_frame : store_no_room;
}

bool CudaStore::ran_short() {
  if (!appends_share_frames()) return false;
  CudaStoreCounters now;
  auto* counters = counters_.as<CudaStoreCounters>();
  copy_memory(&now, counters, sizeof now, stream_);
  synchronize(stream_);
  free_bound_[device_pool] = std::min<std::int64_t>(free_bound_[device_pool], now.free(device_pool));
  if ((now.error & missing_frame()) == 0) return false;
  zero_memory(&counters->error, sizeof now.error, stream_);
  return true;
}

void CudaStore::reserved(bool yes) {
  // Work beside a step that could not be captured belongs to no graph.
  if (reserved_ && !yes && side_->busy()) side_->forget();
  beside_ = beside_ && yes;
  reserved_ = yes;
  if (!yes) fetches_.clear();  // an error ended the step
}

void CudaStore::update() {
  end_layers();
  if (reloads_) collect_reloads();
  if (!stale_) return;
  settle();
  const Shape& s = options_.shape;
  auto* counters = counters_.as<CudaStoreCounters>();
  if (options_.host_pages && capped(Tier::host)) {
    zero_memory(&counters->owed, sizeof counters->owed, stream_);
    only_on_cuda<cuda_store::count_owed>(layer(0), s.layers, stream_);
  }
  copy_memory(&known_, counters, sizeof known_, stream_);
  copy_memory(lengths_.data(), length_.as<>(), length_.bytes(), stream_);
  copy_memory(archive_lengths_.data(), archived_.as<>(), archived_.bytes(), stream_);
  if (spare_counts_) copy_memory(spare_.data(), spare_counts_.as<>(), spare_counts_.bytes(), stream_);
  synchronize(stream_);
  stale_ = false;
  since_refresh_ = 0;
  for (int l = 0; l < s.layers; ++l)
    for (int slot = 0; slot < s.max_slots; ++slot) {
      const auto* first = lengths_.data() + head_index(l, slot, 0);
      bound(l, slot) = *std::max_element(first, first + s.kv_heads);
    }
  for (std::size_t t = 0; t < pools; ++t) free_bound_[t] = known_.free(t);
  if (options_.host_pages && capped(Tier::host)) free_bound_[1] -= known_.owed;
  count_ledger();
  set_back_counts();
  // The device's peaks start again from the frames and pages now in use.
  std::int32_t frames[pools];
  for (std::size_t t = 0; t < pools; ++t) frames[t] = static_cast<std::int32_t>(in_use(t));
  copy_memory(counters->peak_frames, frames, sizeof frames, stream_);
  copy_memory(&counters->peak_pages, &known_.pages, sizeof known_.pages, stream_);
  const int error = known_.error;
  if (error == 0) return;
  zero_memory(&counters->error, sizeof error, stream_);
  known_.error = 0;
  // What else went wrong may follow from a frame that was missing.
  if (error & missing_frame()) {
    const char* text = "got no free frame for a page that a place edit brings, wanted more device or host memory";
    if (appends_share_frames()) throw NoFrame(text);
    throw NoRoom(text);
  }
  if (error & store_only_copy)
    throw Error(Errc::plugin, "got a drop of a page's only copy, wanted an evict or an offload first");
  if (error & store_bad_attend)
    throw Error(Errc::plugin, "attend list: got a page or token that the head does not have");
  if (error & ops::page_absent)
    throw Error(
        Errc::plugin,
        "got an op or attention that reads a page which is not on the device, wanted the page recalled or placed "
        "there before");
  if (error & store_bad_list)
    throw Error(Errc::plugin,
                "edit: got a list that does not ascend or goes beyond its room, the head's tokens or its archive");
  throw Error(Errc::internal, "store: a kernel found no place for a token (error " + std::to_string(error) + ")");
}

// Between two updates no count falls by more than a pool's capacity, nor grows by more than twice as much: frames that
// come back are none that the host knows to be free.
void CudaStore::set_back_counts() {
  auto* counters = counters_.as<CudaStoreCounters>();
  for (std::size_t t = 0; t < pools; ++t) {
    const std::int32_t places = places_of(t);
    if (places == 0 || known_.taken[t] / places == 1) continue;
    const std::int32_t by = (known_.taken[t] / places - 1) * places;
    known_.taken[t] -= by, known_.given[t] -= by;
    copy_memory(&counters->taken[t], &known_.taken[t], sizeof known_.taken[t], stream_);
    copy_memory(&counters->given[t], &known_.given[t], sizeof known_.given[t], stream_);
  }
}

void CudaStore::count_ledger() {
  const std::int64_t columns = std::int64_t{layouts_[0].state_columns} * layouts_[0].page_size * 4;
  const std::int64_t pages = summary_bytes_ ? known_.pages : 0;
  ledger_.hold(Tier::device, Tag::summaries, (pages - counted_pages_) * summary_bytes_);
  counted_pages_ = pages;
  for (std::size_t t = 0; t < pools; ++t) {
    const Tier tier = t == host_pool ? Tier::host : Tier::device;
    const Stored as = t == host_pool ? Stored::host : t == lower_pool ? Stored::second : Stored::first;
    const PageLayout& l = layout_of(t);
    const std::pair<Tag, std::int64_t> parts[] = {{Tag::keys, l.v - l.k},
                                                  {Tag::values, l.k_meta - l.v},
                                                  {Tag::codec_metadata, l.positions - l.k_meta},
                                                  {Tag::positions, l.bytes - l.positions - columns},
                                                  {Tag::scores, columns}};
    const std::int64_t frames = in_use(t),
                       moved = t == lower_pool ? 0 : static_cast<std::int64_t>(known_.moved[t] - counted_moved_[t]),
                       spared = t == lower_pool ? 0 : static_cast<std::int64_t>(known_.spared[t] - counted_spared_[t]);
    for (const auto& [tag, bytes] : parts) {
      ledger_.hold(tier, tag, (frames - counted_frames_[t]) * bytes, as);
      ledger_.move(tier, tag, moved * bytes, as);
    }
    for (const Tag side : {Tag::keys, Tag::values}) ledger_.move(tier, side, -spared * 8, as);
    counted_frames_[t] = frames;
    if (t != lower_pool) counted_moved_[t] = known_.moved[t], counted_spared_[t] = known_.spared[t];
    std::int64_t peak = std::max<std::int64_t>(0, known_.peak_frames[t] - frames) * l.bytes;
    if (t == 0 && summary_bytes_) peak += std::max<std::int64_t>(0, known_.peak_pages - pages) * summary_bytes_;
    ledger_.raise_peak(tier, ledger_.total(tier) + peak);
  }
  ledger_.move(Tier::host, Tag::scores, static_cast<std::int64_t>(known_.states - counted_states_) * columns,
               Stored::host);
  counted_states_ = known_.states;
  ledger_.move(Tier::device, Tag::keys,
               static_cast<std::int64_t>(known_.rebuilt - counted_rebuilt_) * (layouts_[0].k - layouts_[0].v),
               Stored::first);
  counted_rebuilt_ = known_.rebuilt;
  count_fetched(layouts_[0], static_cast<std::int64_t>(known_.fetched - counted_fetched_));
  counted_fetched_ = known_.fetched;
}

bool CudaStore::reserve(const Frames& frames) {
  const auto lacks = [&] {
    for (std::size_t t = 0; t < pools; ++t)
      if (frames[t] > 0 && free_bound_[t] < frames[t]) return true;
    return false;
  };
  if (lacks()) update();
  if (lacks() && all_reloaded()) update();
  // Where a pool grows, the other one may have to give extents back that it needs.
  for (const CudaPool pool : {device_pool, lower_pool, device_pool, lower_pool})
    if (two_codecs() && free_bound_[pool] < frames[pool]) grow(pool, frames[pool]);
  if (lacks()) return false;
  for (std::size_t t = 0; t < pools; ++t) free_bound_[t] -= frames[t];
  return true;
}

bool CudaStore::reserve_by_spilling(std::int64_t frames) {
  while (!reserve(Tier::device, frames))
    if (!spill_one()) return false;
  return true;
}

Fit CudaStore::append(int index, int slot, const void* k, const void* v, DType dtype, std::int64_t stride, int tokens,
                      int first, std::int32_t* nonfinite) {
  const Shape& s = options_.shape;
  if (tokens <= 0) return Fit::ok;
  const int p = s.page_size, room = static_cast<int>(pages_per_head_) * p;
  if (bound(index, slot) + tokens > room) update();
  if (bound(index, slot) + tokens > room)
    throw Error(Errc::internal, "appended beyond max_tokens " + std::to_string(s.max_tokens));
  if (takes_twice_) settle();  // a chunk may need more frames than place edits leave
  // Each head's partly filled last page may have to come from the host first.
  const std::int64_t lower = tails_below() ? s.kv_heads : 0;
  if (!reserve(Tier::device, std::int64_t{s.kv_heads} * ((tokens + p - 1) / p + 1))) {
    std::int64_t fresh = lower;
    for (int head = 0; head < s.kv_heads; ++head) {
      const int n = lengths_[head_index(index, slot, head)];
      fresh += (n + tokens + p - 1) / p - (n + p - 1) / p;
    }
    if (!reserve_by_spilling(fresh)) return Fit::out_of_memory;
  }
  CudaStoreAppend a;
  a.slot = slot;
  a.tokens = tokens;
  a.first = first;
  a.k = k;
  a.v = v;
  a.dtype = dtype;
  a.stride = stride;
  a.nonfinite = nonfinite;
  only_on_cuda<cuda_store::append>(layer(index), a, stream_);
  bound(index, slot) += tokens;
  stale_ = true;
  return Fit::ok;
}

void CudaStore::count_edits_anew() {
  constexpr std::size_t before = offsetof(CudaStoreCounters, last_step);
  static_assert(before + sizeof(CudaStoreCounters::last_step) + sizeof(CudaStoreCounters::last_edit) ==
                sizeof(CudaStoreCounters));
  zero_memory(counters_.as<>() + before, counters_.bytes() - before, stream_);
}

void CudaStore::leave_room(const std::vector<std::int32_t>& slots, bool late) {
  late_ = options_.archive && late;
  copies_ = (options_.host_pages && any_spills(slots)) || options_.archive;
  leave_room_to_checks(false);
}

void CudaStore::leave_room_to_checks(bool yes) const {
  using cuda_store::BesideStep;
  only_on_cuda<cuda_store::leave_room>(yes && late_ ? BesideStep::checks
                                       : copies_    ? BesideStep::copies
                                                    : BesideStep::nothing);
}

void CudaStore::make_way(const std::vector<std::int32_t>& slots) {
  if (!options_.host_pages || free_bound_[0] >= fresh_pages(slots) + placed_pages(slots)) return;
  do {
    update();
    if (free_bound_[0] >= fresh_pages_of(slots) + placed_pages(slots)) return;
  } while (spill_one());
}

bool CudaStore::reserve_step(const std::vector<std::int32_t>& slots, const Taken& edits) {
  // Place edits of the step may write down the pages that this step and the one before fill. Their frames are asked for
  // first, since an exact answer forgets what was reserved.
  std::int64_t down = (capped(Tier::host) ? placed_pages(slots) : 0) + edits.frames[1];
  if (down > 0 && free_bound_[1] < down) {
    update();
    down = (capped(Tier::host) ? filled_pages_of(slots) : 0) + edits.frames[1];
    if (free_bound_[1] < down) return false;
  }
  settle();
  const std::int64_t places = placed_pages(slots) + edits.frames[device_pool];
  const auto reserve_pages = [&](std::int64_t pages) { return reserve({pages, 0, edits.frames[lower_pool]}); };
  if (!reserve_pages(fresh_pages(slots) + places)) {
    const std::int64_t fresh = fresh_pages_of(slots);
    if (!reserve_pages(fresh + places) && (edits.frames[device_pool] > 0 || !reserve_pages(fresh))) return false;
  }
  if (two_codecs()) note_lowered(0, in_all_layers(slots));
  if (down > 0 && !reserve(Tier::host, down)) return false;
  for (int l = 0; l < options_.shape.layers; ++l)
    for (int slot : slots) ++bound(l, slot);
  stale_ = true;
  return true;
}

Fit CudaStore::before_step(int index, const std::vector<std::int32_t>& slots, kvlab::ops::RopeAppendArgs& a) {
  const Shape& s = options_.shape;
  const std::int64_t rows = static_cast<std::int64_t>(slots.size());
  const auto since = [&](const std::vector<bool>& edits) {
    return !edits.empty() && edits[static_cast<std::size_t>(index)];
  };
  if (since(placing_) || since(fetching_)) settle();
  if (!reserved_ && !reserve(Tier::device, rows * s.kv_heads) && !reserve_by_spilling(fresh_pages_of(index, slots)))
    return Fit::out_of_memory;
  const CudaStoreLayer l = layer(index);
  const CudaStoreRows r{rows_of(slots), static_cast<int>(rows)};
  if (tails_below()) only_on_cuda<cuda_store::before_step>(l, r, stream_);
  a.rows = r.rows;
  a.base = l.base[0];
  a.layouts = layouts_;
  a.codecs = two_codecs() ? 2 : 1;
  a.codec = 0;
  a.table =
      View<PageEntry, 3>::dense(l.table[0], {s.max_slots, s.kv_heads, static_cast<std::int64_t>(pages_per_head_)});
  a.length = View<std::int32_t, 2>::dense(l.length, {s.max_slots, s.kv_heads});
  a.slots = r.slots;
  a.pool = l.pool[0];
  a.error = &l.counters->error;
  a.summary = l.summary;
  a.summary_bits = l.summary_bits;
  if (l.summaries) {
    a.summaries = View<std::byte, 4>::dense(
        l.summaries, {s.max_slots, s.kv_heads, static_cast<std::int64_t>(pages_per_head_), summary_bytes_});
    a.bounds_hold = !l.mixed;  // a page that crosses to the other tier is encoded anew and keeps its summary
    a.pages = &l.counters->pages;
  }
  if (!reserved_)
    for (int slot : slots) ++bound(index, slot);
  stale_ = true;
  return Fit::ok;
}

std::int64_t CudaStore::fresh_pages_of(int index, const std::vector<std::int32_t>& slots) const {
  const Shape& s = options_.shape;
  std::int64_t fresh = 0;
  for (int slot : slots)
    for (int head = 0; head < s.kv_heads; ++head)
      fresh += tails_below() || lengths_[head_index(index, slot, head)] % s.page_size == 0;
  return fresh;
}

std::int64_t CudaStore::fresh_pages_of(const std::vector<std::int32_t>& slots) const {
  std::int64_t fresh = 0;
  for (int l = 0; l < options_.shape.layers; ++l) fresh += fresh_pages_of(l, slots);
  return fresh;
}

std::int64_t CudaStore::filled_pages_of(const std::vector<std::int32_t>& slots) const {
  const Shape& s = options_.shape;
  std::int64_t filled = 0;
  for (int l = 0; l < s.layers; ++l)
    for (int slot : slots)
      for (int head = 0; spills(slot) && head < s.kv_heads; ++head)
        filled += (lengths_[head_index(l, slot, head)] + 1) % s.page_size == 0;
  return filled;
}

void CudaStore::close(int slot) {
  settle();
  all_reloaded();
  only_on_cuda<cuda_store::clear>(layer(0), options_.shape.layers, slot, stream_);
  if (options_.archive)
    only_on_cuda<cuda_store::free_archives>(layer(0), options_.shape.layers, Heads{}, CudaStoreRows{rows_of({slot}), 1},
                                            stream_);
  workspace_.clear_slot(slot);
  forget(slot);
  for (int l = 0; l < options_.shape.layers; ++l) bound(l, slot) = 0;
  if (two_codecs()) {
    note_lowered(0, in_all_layers({slot}), false);
    for (const CudaPool pool : {device_pool, lower_pool}) arrange(pool);
  }
  if (spill_rooms_ && !spills_at_once())
    zero_memory(spill_rooms_.as<std::int32_t>() + slot, sizeof(std::int32_t), stream_);
  stale_ = true;
}

void CudaStore::mark_spilled(int slot, int room) {
  const std::int32_t mark = 1 + room;
  if (spill_rooms_) copy_memory(spill_rooms_.as<std::int32_t>() + slot, &mark, sizeof mark, stream_);
}

std::int64_t CudaStore::spare_bytes() const {
  refresh();
  return spare_pages() * layouts_[0].bytes;
}

std::int64_t CudaStore::free_frames(Tier tier) const {
  const std::int64_t own = free_bound_[static_cast<std::size_t>(tier)];
  if (tier == Tier::host || !two_codecs()) return own;
  return own + static_cast<std::int64_t>(extents_.left.size()) * extents_.each[device_pool];
}

// Edits that encode pages reserve frames for all that they may list. Frames of whole extents take their place.
std::int64_t CudaStore::lower_room(const std::vector<std::int32_t>& slots) const {
  if (!two_codecs()) return 0;
  const Shape& s = options_.shape;
  const std::int64_t most = static_cast<std::int64_t>(slots.size()) * s.layers * s.kv_heads * encoded_of_head_;
  const auto lacking = [&] {
    const std::int64_t each = extents_.each[lower_pool];
    return (std::max<std::int64_t>(0, most - free_bound_[lower_pool]) + each - 1) / each;
  };
  const auto left = [&] { return static_cast<std::int64_t>(extents_.left.size()); };
  if (lacking() > left() && !stale_) const_cast<CudaStore&>(*this).reclaim();
  if (lacking() > left()) return std::numeric_limits<std::int32_t>::max();
  return lacking() * extents_.each[device_pool];
}

void CudaStore::advanced(bool decode) {
  // Bounds on lengths grow with each token even if evictions keep the heads as short, so the host reads the lengths.
  constexpr int steps = 32;
  if (!decode || ++since_refresh_ >= steps * static_cast<int>(std::count(used_.begin(), used_.end(), true))) update();
}

std::int64_t CudaStore::fired() const {
  refresh();
  return static_cast<std::int64_t>(known_.fired);
}

Ledger& CudaStore::ledger() {
  update();
  return ledger_;
}

std::int64_t CudaStore::page_bytes(Tier tier) const {
  refresh();
  const auto bytes = [&](std::size_t pool) { return in_use(pool) * layout_of(pool).bytes; };
  return bytes(static_cast<std::size_t>(tier)) + (tier == Tier::device && two_codecs() ? bytes(lower_pool) : 0);
}

std::array<std::int64_t, pools> CudaStore::empty_places() const {
  refresh();
  const int p = options_.shape.page_size;
  const auto behind = [&](const std::vector<std::int32_t>& lengths) {
    std::int64_t sum = 0;
    for (const std::int32_t n : lengths) sum += (p - n % p) % p;
    return sum;
  };
  const std::int64_t archived = behind(archive_lengths_);
  if (!tails_below() && !two_codecs()) return {behind(lengths_), archived, 0};
  // Only the tables tell where a partly filled page is.
  std::array<unsigned long long, pools> places;
  if (!empty_places_) empty_places_ = StreamMemory(stream_, sizeof places);
  auto* there = empty_places_.as<unsigned long long>();
  zero_memory(there, sizeof places, stream_);
  only_on_cuda<cuda_store::count_empty_places>(layer(0), heads_, there, stream_);
  copy_memory(places.data(), there, sizeof places, stream_);
  synchronize(stream_);
  std::array<std::int64_t, pools> out;
  std::copy(places.begin(), places.end(), out.begin());
  out[host_pool] += archived;
  return out;
}

std::int64_t CudaStore::page_limit() const {
  if (!capped(Tier::device)) return options_.device_limit;
  return two_codecs() ? static_cast<std::int64_t>(extents_.owner.size()) * extents_.bytes
                      : capacity_[0] * layouts_[0].bytes;
}

void CudaStore::protect_host(bool on) {
  if (on) refuse("got protect_host, wanted it only on the CPU: pinned memory cannot be made unreadable");
}

}  // namespace kvlab
