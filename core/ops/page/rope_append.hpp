// What lies between the QKV product and attention, on CUDA alone: QK norm, RoPE and, in a decode step, the new token of
// every row into its page. Everything is in device memory but the layouts.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>

#include <cstdint>

namespace kvlab::ops {

// Frames that are not in use, of one size. A frame is taken from the end: free[--*free_count].
struct FramePool {
  std::int32_t* free = nullptr;  // frame numbers
  std::int32_t* free_count = nullptr;
};

// Bits of *RopeAppendArgs::error. What could not be written is left as it was, lengths included.
enum AppendError : int {
  append_no_frame = 1,     // the pool is empty
  append_no_page = 2,      // the head's table is full
  append_no_angle = 4,     // a position outside of the angles
  append_page_absent = 8,  // the page to go on with has no frame on the device
};

// With `append`, position, slots and angles are read before the work in front of it in the stream has ended: no kernel
// writes them.
struct RopeAppendArgs {
  // head_dim a multiple of 8 up to 256.
  int rows = 0, heads = 0, kv_heads = 0, head_dim = 0;
  // [rows, heads + 2 kv_heads, head_dim]: a row's queries, keys, values. Queries and keys are normed and rotated in
  // place; values stay. 16-byte aligned, as norms and angles are; qkv_stride a multiple of 4.
  float* qkv = nullptr;
  std::int64_t qkv_stride = 0;
  // Optional: [rows, heads, head_dim], dense, 16-byte aligned: the queries once more, rounded to bf16 or f16.
  void* rounded = nullptr;
  DType rounded_dtype = DType::bf16;
  const float *query_norm = nullptr, *key_norm = nullptr;  // [head_dim] or null
  float eps = 0;
  bool turn = true;                                // false: heads are normed only (RoPE by rank)
  const float *cosine = nullptr, *sine = nullptr;  // [angles, head_dim / 2], attention_scale in them; pairs i, i + D/2
  int angles = 0;
  const std::int32_t* position = nullptr;  // [row] of the text
  // Optional: nonfinite[row * nonfinite_step] becomes 1 where one of the row's queries or keys, or of the values that
  // are appended, is NaN or infinite, or is so in the dtype of the cache.
  std::int32_t* nonfinite = nullptr;
  int nonfinite_step = 1;  // 0: all rows have one

  // false: nothing goes into the cache, and of what follows only `error` is looked at, which may be null.
  bool append = true;
  // One layer of the cache; length is the number of tokens before this one and becomes one more.
  std::byte* base = nullptr;
  const PageLayout* layouts = nullptr;  // host memory, `codecs` of them
  int codecs = 1;
  int codec = 0;                        // of a new page
  View<PageEntry, 3> table;             // [slot, kv_head, page]
  View<std::int32_t, 2> length;         // [slot, kv_head]
  const std::int32_t* slots = nullptr;  // [row]; no slot twice
  FramePool pool;                       // of frames of `codec`
  std::int32_t* error = nullptr;        // ored with AppendError
};
void rope_append(const RopeAppendArgs& a, Stream s);  // Errc::unsupported for a CPU stream

}  // namespace kvlab::ops
