// QK norm and RoPE between the QKV product and attention, on CUDA alone. A decode step also appends every row's new
// token to its page. All pointers but the layouts are device memory.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>

#include <cstdint>

namespace kvlab::ops {

// Free frames, all of one size: a circular list. Frames are taken at its start. They are given back there, so that they
// are the next ones to be taken. A kernel that also takes frames gives them back at the end. Then as many frames as it
// takes must be free before it. The owner keeps both counts from 0 on and from overflow.
struct FramePool {
  std::int32_t* ring = nullptr;                     // [capacity] frame numbers
  std::int32_t *taken = nullptr, *given = nullptr;  // *given - *taken frames are free
  std::int32_t capacity = 0;                        // no pool has more frames

  // The place of frame i: *taken is that of the next one, *given is behind the last one.
  constexpr std::int32_t& at(std::int32_t i) const {
    return ring[static_cast<std::uint32_t>(i) % static_cast<std::uint32_t>(capacity)];
  }
};

// Bits of *RopeAppendArgs::error. A token that could not be written changes neither page nor length.
enum AppendError : int {
  append_no_frame = 1,     // the pool is empty
  append_no_page = 2,      // the head's table is full
  append_no_angle = 4,     // the position is not in [0, angles)
  append_page_absent = 8,  // the head's last page has no frame on the device
};

// With `append`, the kernel reads position, slots and angles before the preceding kernel in the stream ends. No kernel
// may write them.
struct RopeAppendArgs {
  // head_dim is a multiple of 8 up to 256.
  int rows = 0, heads = 0, kv_heads = 0, head_dim = 0;
  // [rows, heads + 2 kv_heads, head_dim]: queries, keys and values of a row. The kernel norms and rotates queries and
  // keys in place. qkv, norms and angles are 16-byte aligned; qkv_stride is a multiple of 4 floats.
  float* qkv = nullptr;
  std::int64_t qkv_stride = 0;
  // Optional: [rows, heads, head_dim], dense, 16-byte aligned. The kernel also writes the queries here, rounded to bf16
  // or f16.
  void* rounded = nullptr;
  DType rounded_dtype = DType::bf16;
  const float *query_norm = nullptr, *key_norm = nullptr;  // [head_dim] or null
  float eps = 0;
  bool turn = true;                                // false: norm only; rope_rank rotates
  const float *cosine = nullptr, *sine = nullptr;  // [angles, head_dim / 2] times attention_scale; pairs i, i + D/2
  int angles = 0;
  const std::int32_t* position = nullptr;  // [row] text position
  // Optional: nonfinite[row * nonfinite_step] becomes 1 if a query, key or appended value of the row is NaN or
  // infinite. Appended keys and values that become infinite in the cache's dtype count too.
  std::int32_t* nonfinite = nullptr;
  int nonfinite_step = 1;  // 0: all rows share one flag

  // false: the kernel does not touch the cache; of the members below it uses only `error`, which may be null.
  bool append = true;
  // One layer of the cache. length counts the tokens before this one; the kernel adds one.
  std::byte* base = nullptr;
  const PageLayout* layouts = nullptr;  // host memory, `codecs` of them
  int codecs = 1;
  int codec = 0;                        // codec of a new page
  View<PageEntry, 3> table;             // [slot, kv_head, page]
  View<std::int32_t, 2> length;         // [slot, kv_head]
  const std::int32_t* slots = nullptr;  // [row]; no slot twice
  FramePool pool;                       // frames of `codec`
  std::int32_t* error = nullptr;        // the kernel ors AppendError bits into it

  // Optional summaries of pages, in the cache's dtype or in codes. The kernel writes those of the pages that it
  // extends, with the bits of ops::summarize_page.
  Summary summary = Summary::none;
  int summary_bits = 16;         // or 8: the kernel reads the page's keys
  View<std::byte, 4> summaries;  // [slot, kv_head, page, byte], 16-byte aligned
  bool bounds_hold = true;  // min_max: the stored bounds are those of the page's keys; else the kernel reads the keys
  std::int32_t* pages = nullptr;  // with summaries: the kernel adds the number of new pages
};
void rope_append(const RopeAppendArgs& a, Stream s);  // Errc::unsupported for a CPU stream

}  // namespace kvlab::ops
