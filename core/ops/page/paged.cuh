// PagedKv for kernels: reads stored tokens of any codec as f32 elements.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <kvlab/kv.hpp>

#include <cstdint>
#include <type_traits>

#include "ops/page/codes.hpp"
#include "ops/page/paged.hpp"

namespace kvlab::ops {

struct DeviceKv {
  static constexpr int most_codecs = 2;
  PagedKv kv;                       // tables and slots in device memory
  PageLayout layouts[most_codecs];  // copies: kernels cannot read host memory
  int kv_heads = 0, head_dim = 0, page_size = 0;

  DeviceKv() = default;
  explicit DeviceKv(const PagedKv& view)
      : kv(view), kv_heads(view.kv_heads), head_dim(view.head_dim), page_size(view.page_size) {
    for (int i = 0; i < (view.lower_pages ? 2 : 1); ++i) layouts[i] = view.layouts[i];
  }

#ifdef __CUDACC__
  struct Token {
    const std::byte* frame;
    const PageLayout* layout;
    int offset;

    __device__ float element(bool key, int d) const {
      const PageLayout& l = *layout;
      const CodecSide side = side_of(l, key);
      const std::byte* row = frame + row_offset(l, key, offset);
      if (side.bits) {
        const __half* meta = reinterpret_cast<const __half*>(
            frame + (side.grouped() ? meta_offset(l, key, offset, d) : meta_offset(l, key, offset)));
        return value_of(side, code_at(side, row, d)) * __half2float(meta[0]) + __half2float(meta[1]);
      }
      if (l.dtype == DType::f32) return reinterpret_cast<const float*>(row)[d];
      if (l.dtype == DType::f16) return __half2float(reinterpret_cast<const __half*>(row)[d]);
      return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[d]);
    }
    __device__ float key(int d) const { return element(true, d); }
    __device__ float value(int d) const { return element(false, d); }
    __device__ std::int32_t position() const {
      return reinterpret_cast<const std::int32_t*>(frame + layout->positions)[offset];
    }
    __device__ float* state(int column) const {
      return reinterpret_cast<float*>(const_cast<std::byte*>(frame) + layout->state) +
             std::int64_t(column) * layout->page_size + offset;
    }
  };

  __device__ int tokens(int row, int head) const {
    return kv.length.data[kv.slots[row] * kv.length.stride[0] + head * kv.length.stride[1]];
  }
  __device__ int pages(int row, int head) const { return (tokens(row, head) + page_size - 1) / page_size; }
  __device__ const PageEntry& entry(int row, int head, int page) const {
    return kv.table.data[kv.slots[row] * kv.table.stride[0] + head * kv.table.stride[1] + page];
  }
  // A page without a frame is noted. What is read of its tokens then is memory of the arena, which begins one granule
  // before frame 0.
  __device__ Token token(int row, int head, int t) const {
    const PageEntry& e = entry(row, head, t / page_size);
    if (e.frame < 0 && kv.error) atomicOr(kv.error, page_absent);
    return {kv.base + std::int64_t(e.frame) * granule_bytes, layouts + e.codec, t % page_size};
  }
  // A token's number in a column of state, to be written; null where its page has no frame, which is noted.
  __device__ float* state(int row, int head, int t, int column) const {
    const Token of = token(row, head, t);
    return entry(row, head, t / page_size).frame < 0 ? nullptr : of.state(column);
  }
  __device__ std::int32_t position(int row, int head, int t) const { return token(row, head, t).position(); }
  // Element d of a key rotated by `rank` places; pairs are (i, i + head_dim / 2).
  __device__ float rotated_key(const Token& token, int d, int rank) const {
    const int half = head_dim / 2, i = d < half ? d : d - half;
    double sine, cosine;
    sincos(double(rank) * kv.rope_table.inv_freq[i], &sine, &cosine);
    const float x = token.key(i), y = token.key(i + half), scale = kv.rope_table.attention_scale;
    const float c = static_cast<float>(cosine) * scale, s = static_cast<float>(sine) * scale;
    return d < half ? x * c - y * s : y * c + x * s;
  }
#endif
};

// Where a number of 4 bytes lies in the frames of each codec: of the page's first token. Others follow in order.
struct FrameColumn {
  std::int32_t at[DeviceKv::most_codecs] = {};

  static FrameColumn positions(const PagedKv& kv) {
    return of(kv, [](const PageLayout& l) { return l.positions; });
  }
  static FrameColumn state(const PagedKv& kv, int column) {
    return of(kv, [&](const PageLayout& l) { return l.state + std::int64_t{4} * column * kv.page_size; });
  }

 private:
  template <class F>
  static FrameColumn of(const PagedKv& kv, const F& offset) {
    FrameColumn c;
    for (int i = 0; i < (kv.lower_pages ? 2 : 1); ++i) c.at[i] = static_cast<std::int32_t>(offset(kv.layouts[i]));
    return c;
  }
};

// Calls f with an integral constant, page_size or 0 for any: a division by a constant is cheap.
template <class F>
void with_page_size(int page_size, const F& f) {
  if (page_size == 16) return f(std::integral_constant<int, 16>{});
  if (page_size == 32) return f(std::integral_constant<int, 32>{});
  f(std::integral_constant<int, 0>{});
}

#ifdef __CUDACC__
// A head's tokens for kernels that read few numbers of each, so that the address is what costs. Page: as
// with_page_size.
template <int Page>
class HeadTokens {
 public:
  __device__ HeadTokens(const PagedKv& kv, int slot, int head)
      : table_(&kv.table(slot, head, 0)), base_(kv.base), error_(kv.error), page_(kv.page_size) {}

  // The entry of token t. A page without a frame is noted; see DeviceKv::token.
  __device__ __forceinline__ PageEntry entry(int t) const {
    const PageEntry e = table_[t / size()];
    if (e.frame < 0 && error_) atomicOr(error_, page_absent);
    return e;
  }
  template <class T>
  __device__ __forceinline__ T* number(const PageEntry& e, const FrameColumn& column, int t) const {
    static_assert(sizeof(T) == 4);
    return reinterpret_cast<T*>(base_ + e.frame * granule_bytes + (e.codec ? column.at[1] : column.at[0])) + t % size();
  }

 private:
  __device__ __forceinline__ int size() const { return Page ? Page : page_; }

  const PageEntry* table_;
  std::byte* base_;
  std::int32_t* error_;
  int page_;
};
#endif

}  // namespace kvlab::ops
