// The store in GPU memory. The host tier has frames of one size, the device as many sizes as codecs. Tables, lengths
// and free lists lie on the device; kernels take frames and give them back without the host. The host tier is pinned
// memory that the same kernels reach.
//
// The host knows positions and steps exactly. It has upper bounds of lengths and lower bounds of free frames. It waits
// for the device's exact numbers after a prompt's chunk, every 32 decode steps, and where an answer is "exact". It also
// waits where a bound does not suffice: a pool may be near its end.
#pragma once
#include <algorithm>
#include <array>

#include "base/side_stream.hpp"
#include "base/stream_memory.hpp"
#include "ops/page/final_list.hpp"
#include "store/cuda_kernels.hpp"
#include "store/reloads.hpp"
#include "store/store.hpp"

namespace kvlab {

// A step or chunk found no frame. It throws from calls within that step or chunk.
class NoFrame final : public NoRoom {
  using NoRoom::NoRoom;
};

class CudaStore final : public Store {
 public:
  // Throws Errc::unsupported for several codecs on the device, or more token state than a kernel moves. The arena takes
  // the frames that the shape can need, at most device_limit and 85% of the free memory.
  CudaStore(const StoreOptions& options, Stream stream);
  static void check(const StoreOptions& options);
  static StoreBytes bytes(const StoreOptions& options);
  CudaStore* cuda() override { return this; }
  ~CudaStore() override;

  void close(int slot) override;
  PagedKv view(int layer, const std::vector<std::int32_t>& slots, Tier tier = Tier::device) const override;
  PagedKv view_all(const std::vector<std::int32_t>& slots) const override;
  Summaries summaries(int layer) const override;
  int length(int layer, int slot, int head) const override;
  int archived(int layer, int slot, int head) const override;
  int max_length(int layer, const std::vector<std::int32_t>& slots) const override;

  // Stores k, v [token, kv_head, head_dim] of f32 or bf16 in device memory, rows `stride` elements apart, at text
  // positions first, first + 1, ... Keys are as CpuStore::append takes them. Changes nothing if it does not fit.
  // nonfinite: optional, device memory; becomes 1 if a key or value is NaN or infinite in the cache's dtype.
  Fit append(int layer, int slot, const void* k, const void* v, DType dtype, std::int64_t stride, int tokens, int first,
             std::int32_t* nonfinite = nullptr);

  // Views a chunk's tokens, appended last, as rows. Row t sees no token after itself: it is slot t of the view and has
  // length[t, kv_head]. length [tokens, kv_heads] and rows [tokens] are device memory of the caller.
  PagedKv causal_view(int layer, int slot, int tokens, std::int32_t* length, std::int32_t* rows) const;

  // Prepares one more token for every row: reserves frames, unless reserve_step did, and fills the store's
  // part of `a`. Then the caller runs ops::rope_append.
  Fit before_step(int layer, const std::vector<std::int32_t>& slots, ops::RopeAppendArgs& a);
  // A graph's edits have the same numbers at every launch. This call inside the graph makes them count each time.
  void count_edits_anew();
  // Notes pages without a frame that attention is about to read: those of the list, or all without one. Nothing is
  // noted in the work of a graph, whose steps would pay for it.
  void note_absent(int layer, const std::vector<std::int32_t>& slots, const IndexList& pages = {}) const;
  // Whether a partly filled last page may be on the host alone, so that before_step has work.
  bool tails_below() const { return pages_below() && !tails_stay_; }
  // Says which rows the next step has, so that its kernels leave room for copies beside it. late: those of archives
  // come after its last layer. It may not depend on graphs, because room decides how kernels cut sums.
  void leave_room(const std::vector<std::int32_t>& slots, bool late);
  // After the last layer of a step whose fetches come late, which their checks precede; false: as before.
  void leave_room_to_checks(bool yes) const;
  // Makes sequences spill, if one more token of every row does not fit otherwise.
  void make_way(const std::vector<std::int32_t>& slots);
  using Frames = std::array<std::int64_t, pools>;
  // Frames that offload, recall, encode and store_as edits of one step take at most.
  struct Taken {
    Frames frames = {};
  };
  // What such edits asked for since the last call.
  Taken taken_by_edits() { return std::exchange(taken_, {}); }
  // Reserves frames for one more token of every row in all layers, for the copies of the pages that it fills, and for
  // `edits`, or reserves none and returns false.
  bool reserve_step(const std::vector<std::int32_t>& slots, const Taken& edits);
  // Says that reserve_step has reserved what the steps and edits to come take, until the next call.
  void reserved(bool yes);
  // Whether a place edit since the last call, or an append behind it, found no frame. Then what ran since is of no use.
  // Asked after each step and chunk, it also tells the host which frames such edits took: their lists may name any
  // number of pages. Exact.
  bool ran_short();

  std::vector<std::byte> save(int slot) const override;
  Fit restore(int slot, const std::vector<std::byte>& snapshot) override;
  Aside set_aside(int slot) const override;
  Fit bring_back(int slot, const Aside& cache) override;
  std::int64_t fired() const override;
  std::vector<std::int32_t> positions_by_place(int layer, int slot, int head) const override;
  void by_place(int layer, std::span<const std::int32_t> slots, View<const float, 3> of,
                View<float, 3> out) const override;
  Ledger& ledger() override;
  const Ledger& ledger() const override { return const_cast<CudaStore*>(this)->ledger(); }
  std::int64_t page_bytes(Tier tier) const override;
  // Returns the room for tokens in partly filled last pages by the pool of their frames, archives' included. Exact.
  std::array<std::int64_t, pools> empty_places() const;
  std::int64_t page_limit() const override;
  std::int64_t spare_bytes() const override;
  void settle() override;
  void note_reloads() override;
  void start_reloads() override;
  bool reloading(int slot) override;
  Fit await_reloads(const std::vector<std::int32_t>& slots) override;
  void protect_host(bool on) override;
  ops::FinalList* final_list() override;
  void check_invariants() const override;

  // Returns a store on the CPU whose slot 0 is a copy of this slot, with the same bytes in the same order.
  std::shared_ptr<CpuStore> copy_of(int slot) const;

 private:
  // Bytes of an arena before its frame 0, where a kernel reads that takes null_frame for a frame.
  static constexpr std::int64_t before_frames = granule_bytes;
  class Pinned {
   public:
    Pinned() = default;
    ~Pinned();
    Pinned(const Pinned&) = delete;
    Pinned& operator=(const Pinned&) = delete;
    bool reserve(std::size_t bytes);  // in place of what it has; keeps that and returns false if they do not fit
    std::byte* data() const { return data_ ? data_ + before_frames : nullptr; }
    std::size_t bytes() const { return bytes_; }

   private:
    std::byte* data_ = nullptr;
    std::size_t bytes_ = 0;
  };

  // Bytes of what the store takes on the device.
  struct Sizes {
    std::size_t table = 0, lengths = 0, lower_pages = 0, rows = 0, all_rows = 0, inv_freq = 0, jobs = 0, summaries = 0;
    std::size_t archive = 0, archived = 0, counters = 0;
    std::size_t place_jobs = 0, place_counts = 0, rebuilds = 0, placed_flags = 0, spilled = 0, spare_counts = 0,
                reloads = 0;  // for place edits
  };
  static Sizes sizes(const StoreOptions& options);

  CudaStoreLayer layer(int layer) const;
  const std::int32_t* rows_of(const std::vector<std::int32_t>& slots) const;
  std::int32_t& bound(int layer, int slot) { return bound_[layer_slot(layer, slot)]; }
  void prepare_places(const Sizes& taken);
  void make_pool(CudaPool pool, std::int64_t frames, std::int64_t places);
  std::int64_t host_frames() const;  // that the host tier shall have
  bool open_host_tier();
  bool pages_below() const { return host_arena_.data() && !options_.archive; }  // whether the host may have some
  // A frame of the device and its copy in host memory.
  struct HostFrame {
    std::int32_t frame = null_frame, granules = 0;
    std::byte* host = nullptr;
  };
  void copy_placed_by_host(const CudaStoreLayer& l, const CudaStorePlace& a, Stream s) const;
  // Copies all of them, by way of pinned memory. The copies have run when it returns.
  void copy_frames(const std::vector<HostFrame>& frames, bool to_host) const;
  StreamMemory empty_table(std::size_t bytes) const;
  void update();  // makes the host's counts and lengths exact; throws the errors that kernels noted
  void refresh() const { const_cast<CudaStore*>(this)->update(); }
  bool appends_share_frames() const;  // with pages that place edits bring
  int missing_frame() const;          // the errors that say that a frame was missing
  void set_back_counts();             // of pools, by whole rounds of their lists
  // Room for frame numbers in a pool's list.
  std::int32_t places_of(std::size_t pool) const {
    return static_cast<std::int32_t>(free_[pool].bytes() / sizeof(std::int32_t));
  }
  // Numbers of `count` free frames of a pool, in the order in which they are taken. The counts are known exactly.
  std::vector<std::int32_t> next_frames(std::size_t pool, std::int64_t count) const;
  void count_ledger();
  // Lowers the bounds by so many frames of each pool, or returns false if one has fewer.
  bool reserve(const Frames& frames);
  bool reserve(Tier tier, std::int64_t frames) {
    Frames of = {};
    of[static_cast<std::size_t>(tier)] = frames;
    return reserve(of);
  }
  std::int64_t in_use(std::size_t pool) const { return capacity_[pool] - known_.free(pool); }
  bool reserve_edit(const Frames& most);  // the frames that an edit takes at most, now or at launches of a graph
  // Whether the tier may be too small for a copy of every page.
  bool capped(Tier tier) const {
    const std::int64_t most =
        tier == Tier::device && two_codecs() ? extents_.frames(device_pool) : capacity_[static_cast<std::size_t>(tier)];
    return most < heads_ * options_.shape.max_pages();
  }
  // With two codecs the arena is cut into extents. Each has frames of one pool, or of none. The host hands them out
  // where a pool runs short, and takes those back whose frames are all free.
  struct Extents {
    std::int64_t bytes = 0;                     // of an extent
    std::array<std::int32_t, pools> each = {};  // frames of a pool in an extent
    std::vector<std::int8_t> owner;             // [extent] its pool; -1 = none
    std::vector<std::int32_t> left;             // extents of no pool
    StreamMemory lists;                         // extents to take; free frames of each; a pool's list; its count
    std::int64_t frames(CudaPool pool) const { return static_cast<std::int64_t>(owner.size()) * each[pool]; }
  };
  std::int64_t room_for_codecs() const;
  static std::int64_t extent_bytes(std::int64_t a, std::int64_t b);
  std::int64_t make_extents(std::int64_t most_bytes);  // returns the bytes of all
  CudaExtents extents_of(CudaPool pool) const;
  void grow(CudaPool pool, std::int64_t frames);  // until so many frames are free, if there are
  void reclaim();
  void arrange(CudaPool pool);
  std::int64_t lower_room(const std::vector<std::int32_t>& slots) const override;
  struct Uncopied {
    std::int64_t pages = 0, owed = 0;  // owed: those of heads that an edit named before
  };
  Uncopied uncopied(const Edit& e, const std::vector<std::int32_t>& slots);
  // Whether an edit means each head: [slot, kv_head]. Waits for the device.
  std::vector<std::uint8_t> marked(const Heads& heads, const std::vector<std::int32_t>& slots);
  bool reserve_archives(const Edit& e, const std::vector<std::int32_t>& slots);
  std::int64_t frames_missing(const CudaStorePageEdit& e, int layer, const std::vector<std::int32_t>& slots) const;
  Applied keep_tokens(const Edit& e, const std::vector<std::int32_t>& slots) override;
  Applied evict_surplus(const Edit& e, const std::vector<std::int32_t>& slots, ops::Finding* nan) override;
  bool may_leave_later(const Edit& e) const override;
  void evict_together(const std::vector<Leaving>& all) override;
  // What stands behind CudaStoreCounters, [layer]: 0 = of evict_surplus, 1 = of place edits.
  unsigned long long* last_of_layers(int kind) const {
    return reinterpret_cast<unsigned long long*>(counters_.as<>() + sizeof(CudaStoreCounters)) +
           kind * options_.shape.layers;
  }
  Applied swap_tokens(const Edit& e, const std::vector<std::int32_t>& slots) override;
  std::optional<Applied> step_down(const std::array<Edit, 3>& edits, const std::vector<std::int32_t>& slots) override;
  Applied edit_pages(const Edit& e, const std::vector<std::int32_t>& slots) override;
  Applied place_pages(const Edit& e, const std::vector<std::int32_t>& slots) override;
  Applied store_levels(const Edit& e, const std::vector<std::int32_t>& slots) override;
  Applied encode_pages(const Edit& e, const std::vector<std::int32_t>& slots);
  // Does what the plan's kernel does. Waits for the device.
  void plan_on_host(const CudaStoreLevels& a, int layer, const std::vector<std::int32_t>& slots);
  void plan_on_host(const CudaStoreEncode& a, int layer, const std::vector<std::int32_t>& slots);
  Applied archive_heads(const Edit& e, const std::vector<std::int32_t>& slots) override;
  Applied fetch_tokens(const Edit& e, const std::vector<std::int32_t>& slots) override;
  Applied rewrite_rows(const Edit& e, const std::vector<std::int32_t>& slots) override;
  void applied() override {
    if (beside_) place_waiting(), fetch_waiting();
  }
  void place_waiting();
  void fetch_waiting();
  void count_spare(const Edit& e, int slot) override;
  void mark_heads(const Heads& heads, const std::vector<std::int32_t>& slots, HeadFlags out) override;
  // Later work runs after all copies for Deadline::sequence. Returns whether there were some.
  bool all_reloaded() const;
  bool end_reloads() const override { return all_reloaded(); }
  Stream working() const override { return beside_ ? side_->stream() : stream_; }
  Pending copied(const Pending& p, int slot, Stream device) const;
  void collect_reloads();
  Fit recall_layer(int layer, int slot) override;
  void mark_spilled(int slot, int room) override;
  std::int64_t free_frames(Tier tier) const override;
  void exact() const override { refresh(); }
  Stream fork() override;
  void forked() override;
  // Reserves exactly known frames of the device. Makes sequences spill where it must.
  bool reserve_by_spilling(std::int64_t frames);
  // Of the next token; exact after exact().
  std::int64_t fresh_pages_of(int layer, const std::vector<std::int32_t>& slots) const;
  std::int64_t fresh_pages_of(const std::vector<std::int32_t>& slots) const override;
  std::int64_t filled_pages_of(const std::vector<std::int32_t>& slots) const;  // that may go to the host
  CudaStorePlace place_of(const Edit& e, const std::vector<std::int32_t>& slots);
  static std::int64_t most_pages_of_layer(const Shape& s) {
    return std::int64_t{s.max_slots} * s.kv_heads * s.max_pages();
  }
  IndexList attend_list(const Edit& e, const std::vector<std::int32_t>& slots, Workspace& w) override;
  void advanced(bool decode) override;
  Fit launch_page_edit(CudaStorePageEdit e, int layer, const std::vector<std::int32_t>& slots);
  Fit copy_in(const CpuStore& from, int slot);
  std::vector<PageEntry> entries(const StreamMemory& table, int slot) const;  // [layer, kv_head, page], exact
  std::size_t slot_index(int layer, int slot) const { return head_index(layer, slot, 0) * pages_per_head_; }

  // Of a pool's frames, and of a page's in a tier.
  const PageLayout& layout_of(std::size_t pool) const {
    return pool == host_pool ? host_layout_ : layouts_[pool == lower_pool];
  }
  const PageLayout& layout_of(int tier, const PageEntry& e) const { return layout_of(pool_of(tier, e)); }
  static std::size_t pool_of(int tier, const PageEntry& e) {
    return tier == 0 && e.codec > 0 ? std::size_t{lower_pool} : static_cast<std::size_t>(tier);
  }
  bool two_codecs() const { return options_.codecs.size() > 1; }

  PageLayout layouts_[2], host_layout_;  // by codec
  std::int64_t heads_ = 0;               // KV heads of all layers and slots
  std::int64_t capacity_[pools] = {};    // frames of a pool
  std::byte* device_frames() const { return arena_.as<>() + before_frames; }
  StreamMemory arena_, table_[2], length_, lower_pages_, summary_pool_, free_[pools], counters_, inv_freq_;
  StreamMemory archive_, archived_;   // CudaStoreLayer::archive, archived; with StoreOptions::archive
  Extents extents_;                   // where the device has two codecs
  std::int64_t encoded_of_head_ = 1;  // pages that an edit to the second codec may list of a head
  mutable Pinned packed_;             // frames on their way to host memory or from there
  mutable StreamMemory packing_;
  Pinned host_arena_;
  // Lists of 1, 2, ... max_slots slots, and with StoreOptions::all_layers those of view_all.
  mutable StreamMemory rows_, all_rows_;
  mutable std::vector<std::vector<std::int32_t>> rows_known_, all_rows_known_;  // [n] the list of n slots
  mutable StreamMemory positions_;     // result of the latest positions_by_place
  mutable StreamMemory empty_places_;  // [pool] of empty_places, from its first count on
  // Place edits: one set of jobs for each lane of side_, one for copies in the stream, and the last ones for
  // cuda_store::most_places edits beside a step.
  static constexpr int lane_of_stream = SideStream::lanes, lane_of_beside = SideStream::lanes + 1;
  std::unique_ptr<SideStream> side_;
  std::unique_ptr<Reloads> reloads_;        // with StoreOptions::pauses
  StreamMemory place_jobs_, place_counts_;  // CudaStorePlace::jobs, counts
  StreamMemory rebuilds_, rebuild_counts_;  // CudaStorePlace's, of one edit at a time in the main stream
  StreamMemory returned_;                   // CudaStoreLayer::returned, behind its count
  StreamMemory placed_flags_;               // [layer, slot, kv_head] u8: CudaStoreLayer::placed
  StreamMemory spill_rooms_;                // [slot] CudaStorePlace::spilled
  StreamMemory spare_counts_;               // [layer, slot] Spare
  std::vector<CudaStorePlace> places_;      // edits beside a step that wait for a launch
  std::vector<CudaStoreFetch> fetches_;     // the same
  bool late_ = false, copies_ = false;      // of the latest leave_room: fetches come late; there may be copies
  std::vector<bool> placing_, fetching_;    // [layer] such edits since settle(); empty where there are none
  bool takes_twice_ = false;                // a place edit without reuse since settle()
  // Whether a layer of the sequence may have pages of the second codec. Views of the others say that there is one
  // codec, so ops take their fast kernels: also in a prompt's later layers, when the first ones are stored anew. Views
  // of a graph's steps always say two. The slots may be those of all layers, in layer 0.
  std::vector<bool> lowered_;  // [layer, slot]
  bool lowered(int layer, const std::vector<std::int32_t>& slots) const {
    return two_codecs() && (in_graph_ || std::any_of(slots.begin(), slots.end(),
                                                     [&](int slot) { return lowered_[layer_slot(layer, slot)]; }));
  }
  void note_lowered(int layer, const std::vector<std::int32_t>& slots, bool yes = true) {
    for (const int slot : slots) lowered_[layer_slot(layer, slot)] = yes;
  }
  bool reserved_ = false;
  Taken taken_;
  bool tails_stay_ = true;  // nothing ever brought a partly filled last page to the host
  StreamMemory jobs_;       // one page edit: its count, then CudaStorePageEdit::jobs; from the first such edit on
  unsigned long long edit_ = 0;
  ops::FinalList final_;
  int since_refresh_ = 0;  // decode steps since update(), counted per slot

  // The host's state at the last update, and its bounds since.
  bool stale_ = true;
  CudaStoreCounters known_;
  std::vector<std::int32_t> lengths_, bound_;  // [layer, slot, kv_head], [layer, slot]
  std::vector<std::int32_t> archive_lengths_;  // [layer, slot, kv_head]
  Frames free_bound_ = {};
  Frames counted_frames_ = {};  // counts that the ledger has
  std::int64_t counted_pages_ = 0;
  unsigned long long counted_moved_[2] = {0, 0}, counted_spared_[2] = {0, 0}, counted_states_ = 0, counted_fetched_ = 0,
                     counted_rebuilt_ = 0;
};

}  // namespace kvlab
