// What CudaStore has the device do. The functions lie in libkvlab_cuda.so, so that only_on_cuda (base/device_op.hpp)
// calls them. All pointers are memory that kernels reach; calls return at once, run in the stream's order and may be
// captured in a graph. Lists of a policy are checked on the device: a list that is wrong changes nothing of its head
// and sets a StoreError.
#pragma once
#include <kvlab/edits.hpp>
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>

#include <cstdint>

#include "ops/page/rope_append.hpp"

namespace kvlab {

// Bits of CudaStoreCounters::error, above those of ops::AppendError.
enum StoreError : int {
  store_no_frame = 256,     // a pool was empty although the host had made sure
  store_bad_list = 512,     // a count beyond the list's room, a place beyond the head's, or a list that does not ascend
  store_only_copy = 1024,   // a drop of a page's only copy
  store_bad_attend = 2048,  // an attend list with a page or token that the head does not have
};

struct CudaStoreCounters {
  std::int32_t free[2] = {};         // frames not in use, by tier; the pools' counts
  std::int32_t peak_frames[2] = {};  // in use at most, noted whenever one is given back
  std::int32_t pages = 0;            // of all heads, whatever their tier; only with summaries
  std::int32_t peak_pages = 0;
  std::int32_t error = 0;
  std::int32_t reserved = 0;
  unsigned long long moved[2] = {};  // pages that arrived on a tier
  unsigned long long states = 0;     // pages whose token state went down behind them
  unsigned long long fired = 0;      // edits that changed something
  unsigned long long last_edit = 0;
};

// One layer of the cache. Index 0 is the device tier, 1 the host tier (pinned memory).
struct CudaStoreLayer {
  std::byte* base[2] = {};
  PageEntry* table[2] = {};        // [slot, kv_head, page]
  std::int32_t* length = nullptr;  // [slot, kv_head]
  std::byte* summaries = nullptr;  // [slot, kv_head, page] or null
  std::int64_t summary_bytes = 0;
  Summary summary = Summary::none;
  PageLayout layout, host_layout;   // of the tiers
  bool mixed = false;               // are they different? Then what crosses is encoded anew
  const float* inv_freq = nullptr;  // [head_dim / 2] of keys that follow their rank (re_rotate); null = none do
  int kv_heads = 0, pages = 0;      // pages: of a head's table
  std::int64_t heads_per_layer = 0;
  ops::FramePool pool[2];
  std::int32_t capacity[2] = {};  // frames
  bool poison = false;            // tests: what is given back is filled with poison_byte (store/arena.hpp)
  CudaStoreCounters* counters = nullptr;
};

// k, v [token, kv_head, head_dim] as they are to be stored, rows `stride` elements apart. The host has made sure of
// frames for ceil((length + tokens) / page_size) pages of every head.
struct CudaStoreAppend {
  int slot = 0, tokens = 0, first = 0;  // first: text position
  const void *k = nullptr, *v = nullptr;
  DType dtype = DType::f32;  // f32 or bf16
  std::int64_t stride = 0;
  std::int32_t* nonfinite = nullptr;  // optional: becomes 1 where one is NaN or infinite in the cache's dtype
};

struct CudaStoreRows {
  const std::int32_t* slots = nullptr;  // [row]
  int rows = 0;
};

// Lists [row, kv_head, i] of one edit; `edit` differs from the one before it.
struct CudaStoreList : CudaStoreRows {
  View<const std::int32_t, 3> index;
  View<const std::int32_t, 2> count;
  unsigned long long edit = 0;
};

struct CudaStorePageEdit : CudaStoreList {
  enum Verb : std::uint8_t { offload, recall, recall_all, drop } verb = offload;  // recall_all has no list
  Tier tier = Tier::device;                                                       // of a drop
  std::int32_t* job_count = nullptr;                                              // 0 before
  std::int32_t* jobs = nullptr;  // [3 * entries of the list, or of the rows' tables]: frames from and to, tokens
};

struct CudaStoreAttend : CudaStoreList {
  Pins pins;
  int unit = 1;               // tokens of an entry: the page size for lists of pages, 1 for lists of tokens
  int most = 0;               // entries that a head can have
  View<std::int32_t, 3> out;  // [row, kv_head, i], room for what list and pins can name together
  View<std::int32_t, 2> out_count;
};

namespace cuda_store {

void append(const CudaStoreLayer& s, const CudaStoreAppend& a, Stream stream);
// Before and after ops::rope_append: a page that goes on is on the device alone; new pages are counted, summaries
// follow.
void before_step(const CudaStoreLayer& s, const CudaStoreRows& r, Stream stream);
void after_step(const CudaStoreLayer& s, const CudaStoreRows& r, Stream stream);
// Keeps the listed tokens, or all but them, in the order that CpuStore leaves them in.
void keep(const CudaStoreLayer& s, const CudaStoreList& kept, Stream stream);
void evict(const CudaStoreLayer& s, const CudaStoreList& lost, Stream stream);
void swap_places(const CudaStoreLayer& s, const CudaStoreList& pairs, Stream stream);
void page_edit(const CudaStoreLayer& s, const CudaStorePageEdit& e, Stream stream);
void attend(const CudaStoreLayer& s, const CudaStoreAttend& a, Stream stream);
void clear(const CudaStoreLayer& first, int layers, int slot, Stream stream);  // a slot of every layer
// Text positions of a head's first `tokens` places, wherever their pages are.
void positions(const CudaStoreLayer& s, int slot, int head, int tokens, std::int32_t* out, Stream stream);

}  // namespace cuda_store

}  // namespace kvlab
