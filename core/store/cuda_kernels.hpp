// Device work of CudaStore. The functions lie in libkvlab_cuda.so; only_on_cuda (base/device_op.hpp) calls them. All
// pointers are memory that kernels reach. Calls return at once, run in the stream's order and may go into a graph.
// Kernels check a policy's lists. A wrong list changes nothing of its head and sets a StoreError.
#pragma once
#include <kvlab/edits.hpp>
#include <kvlab/key_factors.hpp>
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>

#include <cstdint>
#include <vector>

#include "ops/page/rope_append.hpp"
#include "store/spare.hpp"

namespace kvlab {

namespace ops {
struct Finding;
}

// Bits of CudaStoreCounters::error, above those of ops::AppendError and ops::page_absent.
enum StoreError : int {
  store_no_frame = 256,  // a pool was empty although the host had reserved frames
  // A count beyond the list's room, a place beyond the head's or its archive's, or a list that does not ascend.
  store_bad_list = 512,
  store_only_copy = 1024,   // a drop of a page's only copy
  store_bad_attend = 2048,  // an attend list with a page or token that the head does not have
  store_no_room = 4096,     // a place edit found no frame
};

// Pools of frames: of each tier, and of the device's second codec.
enum CudaPool : int { device_pool, host_pool, lower_pool, pools };

struct CudaStoreCounters {
  std::int32_t taken[pools] = {}, given[pools] = {};  // the pools' counts
  constexpr std::int32_t free(std::size_t pool) const { return given[pool] - taken[pool]; }
  std::int32_t frames[pools] = {};       // all frames of a pool
  std::int32_t peak_frames[pools] = {};  // most frames in use, noted whenever a kernel gives one back
  std::int32_t pages = 0;                // pages of all heads, whatever their tier; counted only with summaries
  std::int32_t peak_pages = 0;
  std::int32_t error = 0;
  // Frames of the host that heads will take for the pages that they have filled since, once a place edit named them.
  std::int32_t owed = 0;
  unsigned long long moved[2] = {};      // pages that arrived on a tier
  unsigned long long spared[2] = {};     // units of 16 bytes of them that did not cross, because they are packed
  unsigned long long rebuilt = 0;        // pages that arrived on the device without their keys
  unsigned long long states = 0;         // pages whose token state a drop copied to the host
  unsigned long long fetched = 0;        // tokens that came from archives
  unsigned long long fired = 0;          // edits that changed something
  unsigned long long last_step[3] = {};  // as last_edit, of the edits of CudaStoreStep
  // The latest edit that counted. Behind it stand those of evict_surplus, [layer], and those of place edits, [layer],
  // where there are such edits.
  unsigned long long last_edit = 0;
};

// One layer of the cache. Index 0 is the device tier, 1 the host tier (pinned memory).
struct CudaStoreLayer {
  std::byte* base[2] = {};
  PageEntry* table[2] = {};             // [slot, kv_head, page]
  std::int32_t* length = nullptr;       // [slot, kv_head]
  std::int32_t* lower_pages = nullptr;  // [slot, kv_head] pages of the second codec; null = there is one codec
  std::byte* summaries = nullptr;       // [slot, kv_head, page] or null
  std::int64_t summary_bytes = 0;
  Summary summary = Summary::none;
  int summary_bits = 16;
  PageLayout layout, host_layout, lower_layout;  // of the device's first codec, the host tier, the second codec
  // Pages have several layouts: the tiers' codecs differ, so that pages which cross are encoded anew, or the device has
  // two codecs.
  bool mixed = false;
  bool packs = false;                 // full pages on the host are packed
  PageEntry* host_entries = nullptr;  // table[1] of layer 0, in which jobs count entries
  const float* inv_freq = nullptr;    // [head_dim / 2] under re_rotate, where keys follow their ranks; null otherwise
  int kv_heads = 0, pages = 0;        // pages: entries of a head's table
  std::int64_t heads_per_layer = 0;
  ops::FramePool pool[pools];
  // [capacity] device frames that copies give back, and their count. take_back moves them to the pool.
  std::int32_t *returned = nullptr, *returned_count = nullptr;
  PageEntry* archive = nullptr;      // [slot, kv_head, page] of the host tier; null without archives
  std::int32_t* archived = nullptr;  // [slot, kv_head] tokens of an archive
  std::uint8_t* placed = nullptr;    // [slot, kv_head] whether a place edit named the head; null without such edits
  bool poison = false;               // tests: a freed frame is filled with poison_byte (store/arena.hpp)
  CudaStoreCounters* counters = nullptr;
};

// k, v [token, kv_head, head_dim], rows `stride` elements apart, rotated already where the regime stores keys so. The
// host has reserved frames for ceil((length + tokens) / page_size) pages of every head.
struct CudaStoreAppend {
  int slot = 0, tokens = 0, first = 0;  // first: text position
  const void *k = nullptr, *v = nullptr;
  DType dtype = DType::f32;  // f32 or bf16
  std::int64_t stride = 0;
  std::int32_t* nonfinite = nullptr;  // optional: becomes 1 if a value is NaN or infinite in the cache's dtype
};

struct CudaStoreRows {
  const std::int32_t* slots = nullptr;  // [row]
  int rows = 0;
};

// Lists [row, kv_head, i] of one edit. Its number `edit` differs from the previous edit's.
struct CudaStoreList : CudaStoreRows {
  View<const std::int32_t, 3> index;
  View<const std::int32_t, 2> count;
  unsigned long long edit = 0;
};

// Of `layers` layers that follow each other, from the one of the CudaStoreLayer on. Each is an edit of its own, and
// their numbers follow each other, too. Layers differ in `keep` alone. Several have neither scores nor
// CudaStoreLayer::inv_freq.
struct CudaStoreSurplus : CudaStoreRows {
  Surplus of;
  int layer = 0;  // for nan
  int layers = 1;
  int slots_of_layer = 0;              // a slot of the next layer is so many slots further
  std::int64_t next_keep = 0;          // numbers from a layer's first one in `keep` to the next layer's
  ops::Finding* nan = nullptr;         // see Store::apply
  unsigned long long edit = 0;         // of the first layer
  unsigned long long* last = nullptr;  // [layer] the latest edit that counted as fired; edits are numbered from 1
};

struct CudaStoreRewrite : CudaStoreRows {
  bool key = true;
  View<const float, 4> values;  // [row, kv_head, token of the range, head_dim] keys or values
  TokenRange range;
  unsigned long long edit = 0;
};

struct CudaStorePageEdit : CudaStoreList {
  enum Verb : std::uint8_t { offload, recall, recall_all, drop } verb = offload;  // recall_all has no list
  Tier tier = Tier::device;                                                       // a drop frees frames of this tier
  std::int32_t* job_count = nullptr;                                              // the caller sets it to 0
  std::int32_t* jobs = nullptr;  // as of CudaStorePlace, [4 * entries of the list, or of the rows' tables]
};

// Jobs of four words: the kind, the frame to read, the frame to write, tokens. Where pages are packed, the last one is
// the page's entry in CudaStoreLayer::host_entries.
struct CudaStorePlace : CudaStoreList {
  enum Job : std::int32_t { up, down, down_and_leave, leave, up_without_keys };
  struct Move {  // a job as it lies in `jobs`; from, to: frames
    std::int32_t kind, from, to, tokens;
  };
  const std::int32_t* list_slots = nullptr;  // IndexList::slots
  Heads heads;
  Pins pins;
  int room = 0;
  View<const std::int32_t, 2> rooms;
  bool reuse = true;
  int keep = 0;  // without reuse: frames that stay free, for the step's appends and for pages that no other leaves for
  View<const float, 3> order;
  int layer = 0;                  // counted from the one of the CudaStoreLayer that a call gets
  int most = 0;                   // no head has more pages
  std::int32_t* lists = nullptr;  // scratch [row, kv_head, 2, most]
  std::int32_t* jobs = nullptr;   // [4 * rows * kv_heads * most]
  // [slot] 1 + the least pages of a head that stay on the device; 0 = its heads are left alone. null = all are spilled.
  const std::int32_t* spilled = nullptr;
  Spare* spare = nullptr;              // [slot] the numbers of pages are added, and nothing else is done; or null
  std::int32_t* counts = nullptr;      // {jobs, blocks that are done}; zero before and after
  std::int32_t* busy = nullptr;        // [slot] becomes 1 where the plan writes jobs; or null
  bool awaited = false;                // the step waits for the copies
  unsigned long long* last = nullptr;  // the layer's latest edit that counted as fired; edits are numbered from 1
  KeyFactors keys;                     // pages that they cover come without keys; or none
  struct Rebuild {                     // such a page
    std::int32_t slot, head, page, frame;
  };
  Rebuild* rebuilds = nullptr;             // [rows * kv_heads * most], and
  std::int32_t* rebuild_counts = nullptr;  // {pages, blocks that are done}; zero before and after
};

struct CudaStoreEncode : CudaStoreList {
  int codec = 0;
  // A list that goes on where a head's pages of the second codec end. The plan takes its frames and gives the old ones
  // back, before their pages are read: nothing that takes frames runs meanwhile.
  struct Run {
    std::int32_t pages = 0;            // 0 = the list is another
    std::int32_t taken = 0, back = 0;  // in the pools' lists: the first new frame, the first old one's place
  };
  Run* runs = nullptr;  // scratch [row, kv_head]; null = each head's pages one after the other, and there is no plan
};

// Edits of a decode step, which each head carries out in this order: a pair of places to exchange, a token that leaves,
// a full page for the second codec; or none.
struct CudaStoreStep {
  CudaStoreList move, evict, lower;
};

struct CudaStoreLevels : CudaStoreRows {
  View<const std::uint8_t, 3> levels;  // [row, kv_head, token]
  int most = 0;                        // no head has more tokens
  struct Plan {
    std::int32_t kept = -1, low = 0;  // tokens that stay, -1 = all is as it was; those in pages of the second codec
    // Returns the place to come of a token that stays. lows, others: tokens before it of level 1, and others that stay.
    constexpr int place(bool is_low, int lows, int others) const {
      return is_low && lows < low ? lows : low + others + (lows > low ? lows - low : 0);
    }
  };
  Plan* plans = nullptr;             // scratch [row, kv_head]
  static constexpr int chunk = 512;  // tokens
  struct Begin {
    std::int32_t lows = 0, others = 0;  // in front of a chunk, as for Plan::place
  };
  constexpr int chunks() const { return (most + chunk - 1) / chunk; }
  Begin* begins = nullptr;     // scratch [row, kv_head, chunks()]
  PageEntry* fresh = nullptr;  // scratch [row, kv_head, pages of `most`]
  unsigned long long edit = 0;
};

// Extents of the device arena, each with frames of one pool.
struct CudaExtents {
  std::int64_t bytes = 0;                         // of an extent
  std::int32_t each = 0, step = 0;                // of a pool: frames of an extent, granules of a frame
  std::int32_t* extents = nullptr;                // [all] those that the pool takes; or scratch, below
  std::int32_t* begin = nullptr;                  // the same memory: places of the extents in an arranged list
  int count = 0;                                  // of `extents`, or of all
  std::int32_t *free = nullptr, *list = nullptr;  // [all] free frames of an extent; scratch for the pool's list
  std::int32_t* list_count = nullptr;

  constexpr std::int32_t extent_of(std::int32_t frame) const {
    return frame / static_cast<std::int32_t>(bytes / granule_bytes);
  }
};

struct CudaStoreFetch : CudaStoreList {
  const std::int32_t* list_slots = nullptr;  // IndexList::slots
  Heads heads;
  int layer = 0;
  bool held = false;  // hold_list has checked the list and counted the edit
};
inline constexpr int most_fetches = 32;  // of a launch

struct CudaStoreAttend : CudaStoreList {
  const std::int32_t* list_slots = nullptr;  // IndexList::slots
  Pins pins;
  int unit = 1;               // tokens of an entry: the page size for lists of pages, 1 for lists of tokens
  int most = 0;               // most entries of a head
  bool resident = false;      // pages on the device count as listed
  View<std::int32_t, 3> out;  // [row, kv_head, i], with room for the entries of list and pins together
  View<std::int32_t, 2> out_count;
};

// A frame, its granules, and where its copy begins, in granules.
struct CudaStorePacking {
  std::int32_t frame, granules, at;
};

namespace cuda_store {

void append(const CudaStoreLayer& s, const CudaStoreAppend& a, Stream stream);
// before_step runs before ops::rope_append: it brings each head's partly filled last page to the device and frees its
// host copy.
void before_step(const CudaStoreLayer& s, const CudaStoreRows& r, Stream stream);
// keep keeps the listed tokens; evict removes them. Both leave the tokens in the order that CpuStore does.
void keep(const CudaStoreLayer& s, const CudaStoreList& kept, Stream stream);
void evict(const CudaStoreLayer& s, const CudaStoreList& lost, Stream stream);
// Evicts the tokens beyond a number, in one launch for all layers: those that ops::top_tokens would leave out.
void evict_surplus(const CudaStoreLayer& s, const CudaStoreSurplus& a, Stream stream);
void swap_places(const CudaStoreLayer& s, const CudaStoreList& pairs, Stream stream);
// Stores one side of all tokens. Pages are in the cache's dtype.
void rewrite(const CudaStoreLayer& s, const CudaStoreRewrite& a, Stream stream);
void page_edit(const CudaStoreLayer& s, const CudaStorePageEdit& e, Stream stream);
// A place edit is a plan and its copies. The plan takes frames of the pools, changes the tables and writes jobs. The
// copies may run in another stream, beside kernels that take frames: the frames that they give back are `returned`.
// Up to most_places edits, each of a layer of its own, share the plan's launch. They have as many rows each, and may
// share jobs and counts, which then have room for all of them.
inline constexpr std::size_t most_places = 4;
void plan_places(const CudaStoreLayer& first, const std::vector<CudaStorePlace>& all, Stream stream);
void copy_placed(const CudaStoreLayer& s, const CudaStorePlace& a, Stream stream);
// Makes the keys of pages that come without them. It may run beside the copies.
void rebuild_placed(const CudaStoreLayer& s, const CudaStorePlace& a, const RopeTable& rope, Stream stream);
// Says what runs beside the kernels of a step that are launched next. They leave it room.
enum class BesideStep : std::uint8_t { nothing, copies, checks };
void leave_room(BesideStep work);
void take_back(const CudaStoreLayer& s, Stream stream);
// Frees the archives of these heads, in `layers` layers from `first` on.
void free_archives(const CudaStoreLayer& first, int layers, const Heads& heads, const CudaStoreRows& r, Stream stream);
// Copies all pages of these heads to frames of the host, which the caller has reserved. They have no archive.
void archive(const CudaStoreLayer& s, const Heads& heads, const CudaStoreRows& r, Stream stream);
// Copies the listed tokens of archives, for up to most_fetches fetches of as many rows, each of a layer of its own.
// first: the first layer. A head whose list is bad gets none of its tokens.
void fetch(const CudaStoreLayer& first, const std::vector<CudaStoreFetch>& all, Stream stream);
// Returns the fetch with a copy of its list and slots, so that it may run later. The copy lies in memory that is kept
// for the stream `home`, for each lane of a SideStream.
CudaStoreFetch hold_list(const CudaStoreLayer& s, const CudaStoreFetch& a, Stream home, int lane, Stream stream);
// Writes for each head of the rows whether it is meant. out: [slot, kv_head].
void mark_heads(const Heads& heads, const CudaStoreRows& r, HeadFlags out, Stream stream);
// Counts CudaStoreCounters::owed of all layers and slots. first: the first layer.
void count_owed(const CudaStoreLayer& first, int layers, Stream stream);
// Stores full pages in another codec, runs as they are planned. The host has reserved a frame of it for every listed
// page.
void plan_encode(const CudaStoreLayer& s, const CudaStoreEncode& e, Stream stream);
void encode(const CudaStoreLayer& s, const CudaStoreEncode& e, Stream stream);
// Of a device with two codecs, neither of which has groups. The host has reserved a frame of the second for each head.
void step_down(const CudaStoreLayer& s, const CudaStoreStep& a, Stream stream);
// Stores tokens by their levels, as planned. The host has reserved frames of each codec for all pages of the rows.
void plan_levels(const CudaStoreLayer& s, const CudaStoreLevels& a, Stream stream);
void store_levels(const CudaStoreLayer& s, const CudaStoreLevels& a, Stream stream);
// Puts the frames of extents into a pool.
void grant(const CudaStoreLayer& s, CudaPool pool, const CudaExtents& e, Stream stream);
// Counts the free frames of each extent of a pool in e.free, whose other entries it leaves.
void count_free(const CudaStoreLayer& s, CudaPool pool, const CudaExtents& e, Stream stream);
// Orders a pool's list, so that frames of the first extents are taken first. Then the last ones become free.
// e.free is all zeros.
void arrange(const CudaStoreLayer& s, CudaPool pool, const CudaExtents& e, Stream stream);
// Takes the frames of extents that are all free out of the pool.
void take_out(const CudaStoreLayer& s, CudaPool pool, const CudaExtents& e, Stream stream);
// A listed page without a frame on the device is noted and left out, where there is a host tier.
void attend(const CudaStoreLayer& s, const CudaStoreAttend& a, Stream stream);
// Notes the pages without a frame on the device: those of the list, or all of the rows' where a.count is null.
void note_absent(const CudaStoreLayer& s, const CudaStoreList& a, Stream stream);
// Packs frames of the device into host memory that kernels reach, or writes them from there. jobs: [count].
void pack(const CudaStorePacking* jobs, int count, std::byte* device, std::byte* packed, bool to_host, Stream stream);
void clear(const CudaStoreLayer& first, int layers, int slot, Stream stream);  // empties a slot of every layer
// Writes the text positions of a head's first `tokens` places to out [tokens], whatever tier their pages are on.
void positions(const CudaStoreLayer& s, int slot, int head, int tokens, std::int32_t* out, Stream stream);
// One row of Store::by_place.
void by_place(const CudaStoreLayer& s, int slot, View<const float, 3> of, View<float, 3> out, std::int64_t row,
              Stream stream);

}  // namespace cuda_store

}  // namespace kvlab
