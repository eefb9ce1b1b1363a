// Pages whose codes become shorter: their rows are runs of bytes, so a warp takes words of 16 of them.
#pragma once
#include "store/cuda_tokens.cuh"

namespace kvlab::device_store {

// Threads copy fields of a page from the `first` on: positions, then state.
__device__ inline void copy_fields(const std::byte* from, const PageLayout& lf, std::byte* to, const PageLayout& lt,
                                   int thread, int threads, int first = 0) {
  for (int i = first; i <= lf.state_columns; ++i)
    for (int t = thread; t < lf.page_size; t += threads)
      *field(to, lt, t, i) = *field(const_cast<std::byte*>(from), lf, t, i);
}

// Whether each side of a page stays as it is or becomes shorter codes. Then its rows are one run of bytes.
__host__ __device__ inline bool only_lowers(const PageLayout& from, const PageLayout& to) {
  for (const bool key : {true, false}) {
    const CodecSide of = ops::side_of(from, key), as = ops::side_of(to, key);
    const std::int64_t elements = std::int64_t{from.page_size} * from.head_dim;
    if (of.grouped() || (of != as && ops::code_ratio(of, as) == 0) || elements * (of.bits ? of.bits : 16) % 128 != 0)
      return false;
  }
  return true;
}

// Calls f(i, word i of 16 bytes) for a run of bytes. A lane has `batch` on their way.
template <int batch, class F>
__device__ void for_words(const std::byte* from, int words, int lane, const F& f) {
  const auto* in = reinterpret_cast<const uint4*>(from);
  for (int first = lane; first < words; first += 32 * batch) {
    uint4 x[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i) x[i] = in[min(first + 32 * i, words - 1)];
#pragma unroll
    for (int i = 0; i < batch; ++i)
      if (first + 32 * i < words) f(first + 32 * i, x[i]);
  }
}
template <int From, int To, int batch>
__device__ void lower_words(const std::byte* from, std::byte* to, int words, int lane) {
  for_words<batch>(from, words, lane, [&](int i, uint4 codes) {
    const ops::Lowered<From, To> x(codes);
    if constexpr (x.bytes == 8)
      reinterpret_cast<uint2*>(to)[i] = make_uint2(x.word[0], x.word[1]);
    else
      reinterpret_cast<unsigned*>(to)[i] = x.word[0];
  });
}

// A warp stores a side of a page whose layouts are only_lowers, with keys its positions and state. Loads of the first
// tokens' scales and positions are under way with those of the rows.
template <int batch = 8>
__device__ void lower_side(const std::byte* from, const PageLayout& lf, std::byte* to, const PageLayout& lt, bool key,
                           int lane) {
  const int p = lf.page_size;
  const CodecSide of = ops::side_of(lf, key), as = ops::side_of(lt, key);
  const int ratio = of == as ? 1 : ops::code_ratio(of, as);
  const auto* metas = reinterpret_cast<const unsigned*>(from + ops::meta_offset(lf, key, 0));
  const auto put_meta = [&](int t, unsigned meta) {
    *reinterpret_cast<unsigned*>(to + ops::meta_offset(lt, key, t)) = ratio > 1 ? lowered_meta(meta, ratio) : meta;
  };
  const bool first = lane < p;
  const unsigned meta = of.bits && first ? metas[lane] : 0,
                 position = key && first ? *field(const_cast<std::byte*>(from), lf, lane, 0) : 0;
  const std::byte* rows = from + ops::row_offset(lf, key, 0);
  std::byte* out = to + ops::row_offset(lt, key, 0);
  const int words = static_cast<int>(p * ops::row_bytes(lf, key) / 16);
  if (of == as)
    for_words<batch>(rows, words, lane, [&](int i, uint4 x) { reinterpret_cast<uint4*>(out)[i] = x; });
  else if (of.bits == 4)
    lower_words<4, 2, batch>(rows, out, words, lane);
  else if (as.bits == 4)
    lower_words<8, 4, batch>(rows, out, words, lane);
  else
    lower_words<8, 2, batch>(rows, out, words, lane);
  if (of.bits && first) put_meta(lane, meta);
  for (int t = lane + 32; of.bits && t < p; t += 32) put_meta(t, metas[t]);
  if (!key) return;
  if (first) *field(to, lt, lane, 0) = position;
  copy_fields(from, lf, to, lt, lane, 32, p > 32 ? 0 : 1);
}

}  // namespace kvlab::device_store
