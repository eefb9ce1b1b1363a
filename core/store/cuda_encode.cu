// Pages that are stored in another codec of a device with two. Pages of the second codec come first in a head's table.
#include <algorithm>

#include "base/launch.cuh"
#include "base/ptx.cuh"
#include "ops/page/paged.hpp"
#include "store/cuda_lower.cuh"

namespace kvlab {
using namespace cuda;
using namespace device_store;
namespace {

constexpr int threads = 256, warps = threads / 32;

// A block stores a grouped side of a full page, as ops::copy_page does. A warp takes 32 elements, one a lane: of a
// group's tokens, or of `batch` tokens, whose loads do not wait for each other. number(t, d) is an element.
template <int batch, class Number>
__device__ void encode_groups_of(const Number& number, std::byte* to, const PageLayout& l, bool key) {
  const CodecSide side = ops::side_of(l, key);
  const bool channel = side.axis == CodeAxis::channel;
  const int p = l.page_size, dim = l.head_dim, group = ops::group_of(side, p, dim), tiles = (dim + 31) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int each = 8 / side.bits, own = lane % each;  // neighbouring lanes share a byte
  const auto put = [&](float x, const ops::SharedScale& of, int t, int d) {
    unsigned byte = d < dim ? of.code(side, x) << own * side.bits : 0;
    for (int m = 1; m < each; m *= 2) byte |= __shfl_xor_sync(~0u, byte, m);
    if (d < dim && own == 0) to[ops::row_offset(l, key, t) + d / each] = static_cast<std::byte>(byte);
  };
  // Calls f(t, x) for tokens first to end - 1, a batch after the other.
  const auto for_tokens = [&](int first, int end, int d, const auto& f) {
    for (int t = first; t < end; t += batch) {
      float x[batch];
#pragma unroll
      for (int i = 0; i < batch; ++i) x[i] = number(min(t + i, end - 1), d);
#pragma unroll
      for (int i = 0; i < batch; ++i)
        if (t + i < end) f(t + i, x[i]);
    }
  };
  const int tokens = channel ? group : batch, shares = (p + tokens - 1) / tokens * tiles;
  const bool in_lanes = group < 32 ? (group & (group - 1)) == 0 && dim % 32 == 0 : group == 32;
  for (int share = static_cast<int>(threadIdx.x) / 32; share < shares; share += warps) {
    const int first = share / tiles * tokens, end = min(p, first + tokens), d = share % tiles * 32 + lane,
              within = min(d, dim - 1);
    if (channel) {
      float lo = INFINITY, hi = -INFINITY;
      for_tokens(first, end, within, [&](int, float x) { lo = fminf(lo, x), hi = fmaxf(hi, x); });
      const ops::SharedScale of(
          ops::put_scale(ops::code_scale(side, lo, hi), to + ops::meta_offset(l, key, first, within), d < dim));
      for_tokens(first, end, within, [&](int t, float x) { put(x, of, t, d); });
    } else {
      for_tokens(first, end, within, [&](int t, float x) {
        float lo = x, hi = x;
        if (in_lanes) {
          lo = x == x ? x : INFINITY, hi = x == x ? x : -INFINITY;
          for (int m = 1; m < group; m *= 2)
            lo = fminf(lo, __shfl_xor_sync(~0u, lo, m)), hi = fmaxf(hi, __shfl_xor_sync(~0u, hi, m));
        } else {
          lo = INFINITY, hi = -INFINITY;
          for (int i = 0, begin = within / group * group; i < group; ++i) {
            const float y = number(t, begin + i);
            lo = fminf(lo, y), hi = fmaxf(hi, y);
          }
        }
        const ops::SharedScale of(ops::put_scale(ops::code_scale(side, lo, hi),
                                                 to + ops::meta_offset(l, key, t, within), d < dim && d % group == 0));
        put(x, of, t, d);
      });
    }
  }
}

// Rows of bf16 up to 128 elements, of which each lane holds four neighbours of its warp's few tokens.
constexpr int most_held_dim = 128, held_elements = 4;
using HeldRanges = float2[warps][most_held_dim];  // [warp, channel]: the least and the most; later scale and zero
__host__ __device__ bool are_held(const PageLayout& lf, const PageLayout& lt, bool key) {
  const CodecSide side = ops::side_of(lt, key);
  const int p = lf.page_size, own = p / warps, dim = lf.head_dim, group = ops::group_of(side, p, dim);
  if (!side.grouped() || side.kind != CodeKind::integer || ops::side_of(lf, key).bits || lf.dtype != DType::bf16 ||
      dim > most_held_dim || p % warps || (own != 2 && own != 4))
    return false;
  return side.axis == CodeAxis::channel ? group % own == 0 : group % held_elements == 0 && (group & (group - 1)) == 0;
}

template <int Own>  // tokens of a warp
class HeldRows {
 public:
  __device__ HeldRows(const std::byte* from, const PageLayout& lf, bool key)
      : key_(key),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32),
        first_(warp_ * Own),
        d_(lane_ * held_elements),
        there_(d_ < lf.head_dim) {
#pragma unroll
    for (int t = 0; t < Own; ++t)
      if (there_) held_[t] = *reinterpret_cast<const uint2*>(from + ops::row_offset(lf, key, first_ + t) + d_ * 2);
  }
  // The block stores the side as ops::copy_page does. Tokens of a group of channels are of several warps.
  __device__ void store(std::byte* to, const PageLayout& lt, HeldRanges& ranges) const {
    if (ops::side_of(lt, key_).axis == CodeAxis::channel)
      store_channels(to, lt, ranges);
    else
      store_tokens(to, lt);
  }

 private:
  __device__ float number(int t, int e) const {
    const unsigned word = e < 2 ? held_[t].x : held_[t].y;
    return __uint_as_float(e % 2 ? word & 0xffff0000u : word << 16);
  }
  template <class Of>
  __device__ void put(std::byte* to, const PageLayout& lt, int t, const Of& of) const {
    const CodecSide side = ops::side_of(lt, key_);
    unsigned codes = 0;
#pragma unroll
    for (int e = 0; e < held_elements; ++e) codes |= of(e).integer(number(t, e), side.bits) << e * side.bits;
    std::byte* at = to + ops::row_offset(lt, key_, first_ + t) + d_ * side.bits / 8;
    if (side.bits == 8)
      *reinterpret_cast<unsigned*>(at) = codes;
    else if (side.bits == 4)
      *reinterpret_cast<unsigned short*>(at) = static_cast<unsigned short>(codes);
    else
      *at = static_cast<std::byte>(codes);
  }
  __device__ void store_channels(std::byte* to, const PageLayout& lt, HeldRanges& ranges) const {
    const CodecSide side = ops::side_of(lt, key_);
    const int p = lt.page_size, dim = lt.head_dim, group = ops::group_of(side, p, dim), sharers = group / Own;
    if (there_)
#pragma unroll
      for (int e = 0; e < held_elements; ++e) {
        float2 range = make_float2(INFINITY, -INFINITY);
#pragma unroll
        for (int t = 0; t < Own; ++t) range.x = fminf(range.x, number(t, e)), range.y = fmaxf(range.y, number(t, e));
        ranges[warp_][d_ + e] = range;
      }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < p / group * dim; i += threads) {
      const int begin = i / dim * sharers, d = i % dim;
      float2 all = ranges[begin][d];
      for (int w = begin + 1; w < begin + sharers; ++w)
        all.x = fminf(all.x, ranges[w][d].x), all.y = fmaxf(all.y, ranges[w][d].y);
      const ops::CodeScale of =
          ops::put_scale(ops::code_scale(side, all.x, all.y), to + ops::meta_offset(lt, key_, begin * Own, d), true);
      ranges[begin][d] = make_float2(of.scale, of.zero);
    }
    __syncthreads();
    if (!there_) return;
    const auto of_channel = [&](int e) {
      const float2 of = ranges[warp_ / sharers * sharers][d_ + e];
      return ops::SharedScale({of.x, of.y});
    };
    static_assert(held_elements == 4);
    const ops::SharedScale of[] = {of_channel(0), of_channel(1), of_channel(2), of_channel(3)};
#pragma unroll
    for (int t = 0; t < Own; ++t) put(to, lt, t, [&](int e) { return of[e]; });
  }
  __device__ void store_tokens(std::byte* to, const PageLayout& lt) const {
    const CodecSide side = ops::side_of(lt, key_);
    const int group = ops::group_of(side, lt.page_size, lt.head_dim);
#pragma unroll
    for (int t = 0; t < Own; ++t) {
      float lo = INFINITY, hi = -INFINITY;
#pragma unroll
      for (int e = 0; e < held_elements; ++e)
        if (there_) lo = fminf(lo, number(t, e)), hi = fmaxf(hi, number(t, e));
#pragma unroll
      for (int m = 1; m < 32; m *= 2)
        if (m * held_elements < group)
          lo = fminf(lo, __shfl_xor_sync(~0u, lo, m)), hi = fmaxf(hi, __shfl_xor_sync(~0u, hi, m));
      if (!there_) continue;
      const ops::SharedScale of(ops::put_scale(ops::code_scale(side, lo, hi),
                                               to + ops::meta_offset(lt, key_, first_ + t, d_), d_ % group == 0));
      put(to, lt, t, [&](int) { return of; });
    }
  }

  bool key_;
  int lane_, warp_, first_, d_;
  bool there_;  // the rows have the lane's elements
  uint2 held_[Own];
};

// Called once, because compilers take long for it.
__device__ __noinline__ void encode_groups(const std::byte* from, const PageLayout& lf, std::byte* to,
                                           const PageLayout& lt, bool key) {
  __shared__ HeldRanges ranges;
  if (are_held(lf, lt, key)) {
    __syncthreads();  // the other side's ranges are read
    if (lf.page_size / warps == 2) return HeldRows<2>(from, lf, key).store(to, lt, ranges);
    return HeldRows<4>(from, lf, key).store(to, lt, ranges);
  }
  const int dim = lf.head_dim;
  const std::byte* rows = from + ops::row_offset(lf, key, 0);
  if (ops::side_of(lf, key).bits == 0 && lf.dtype == DType::bf16)
    return encode_groups_of<8>(
        [&](int t, int d) {
          return static_cast<float>(reinterpret_cast<const __nv_bfloat16*>(rows)[std::int64_t{t} * dim + d]);
        },
        to, lt, key);
  encode_groups_of<1>([&](int t, int d) { return any_element(from, lf, key, t, d); }, to, lt, key);
}

// Stores a page of the first codec in the second, or the other way. The whole block calls it.
__device__ void encode_page(const CudaStoreLayer& s, int codec, std::int32_t before, std::int32_t fresh) {
  const PageLayout &from = codec > 0 ? s.layout : s.lower_layout, &to = codec > 0 ? s.lower_layout : s.layout;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  constexpr int each = 2;  // tokens of a warp whose loads are under way together
  for (int t = warp; t < s.layout.page_size; t += each * warps) {
    Carried x[each];
#pragma unroll
    for (int i = 0; i < each; ++i)
      if (t + i * warps < s.layout.page_size) x[i].read(frame_at(s, 0, before), from, t + i * warps, to, lane);
#pragma unroll
    for (int i = 0; i < each; ++i)
      if (t + i * warps < s.layout.page_size) x[i].write(frame_at(s, 0, fresh), to, t + i * warps, lane);
  }
  for (const bool key : {true, false})
    if (ops::side_of(to, key).grouped()) encode_groups(frame_at(s, 0, before), from, frame_at(s, 0, fresh), to, key);
}

// A list that goes on where the pages of the second codec end, as a prompt's does: a block takes all its frames at
// once, and no page changes its place. encode_run_kernel then stores the pages side by side.
constexpr int plan_threads = 1024;
__global__ void __launch_bounds__(plan_threads)
    encode_plan_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreEncode a) {
  const int row = blockIdx.x / s.kv_heads, head = blockIdx.x % s.kv_heads, p = s.layout.page_size;
  const Head h = head_of(s, a.slots[row], head);
  let_successor_start();
  const int n = *h.length, count = a.count(row, head), first = *h.lower_pages;
  bool runs = count > 0 && count <= a.index.extent[2] && (first + count) * p <= n;
  if (runs) {
    bool all = true;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < count; i += plan_threads) {
      const PageEntry e = h.table[0][first + i];
      all = all & (a.index(row, head, i) == first + i) & (e.frame >= 0) & (e.codec != a.codec);
    }
    runs = all;
  }
  runs = !__syncthreads_or(!runs);
  if (threadIdx.x > 0) return;
  CudaStoreEncode::Run run;
  if (runs && (run.taken = take_frames(s, pool_of(0, a.codec), count)) >= 0) {
    run.pages = count;
    run.back = place_back(s, device_pool, count);
    *h.lower_pages = first + count;
    count_fired(s, a.edit);
  }
  a.runs[blockIdx.x] = run;
}

// How a run's pages change. lowers: only_lowers. groups: are_held holds for both sides, and a warp has Own tokens.
enum class How { lowers, groups, any };

// Blocks [share of a run, head].
template <How how, int Own = 1>
__global__ void __launch_bounds__(threads, how == How::lowers   ? 4
                                           : how == How::groups ? 3
                                                                : 2)
    encode_run_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreEncode a) {
  const int of = static_cast<int>(blockIdx.y), row = of / s.kv_heads, head = of % s.kv_heads;
  const Head h = head_of(s, a.slots[row], head);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const PageLayout &from = a.codec > 0 ? s.layout : s.lower_layout, &to = a.codec > 0 ? s.lower_layout : s.layout;
  constexpr bool by_warps = how == How::lowers;  // a warp takes a page, else a block
  const int begin = static_cast<int>(blockIdx.x) * (by_warps ? warps : 1) + (by_warps ? warp : 0),
            each = static_cast<int>(gridDim.x) * (by_warps ? warps : 1);
  let_successor_start();
  // The first page comes to the cache beside the plan, which changes neither the list nor a page.
  if (begin < a.count(row, head) && begin < a.index.extent[2])
    if (const int page = a.index(row, head, begin); page >= 0 && page < s.pages)
      if (const std::int32_t frame = h.table[0][page].frame; frame >= 0)
        for (int at = 128 * static_cast<int>(by_warps ? lane : threadIdx.x); at < from.bytes;
             at += 128 * (by_warps ? 32 : threads))
          fetch_line(frame_at(s, 0, frame) + at);
  wait_for_predecessor();
  const CudaStoreEncode::Run run = a.runs[of];
  for (int i = begin; i < run.pages; i += each) {
    const int page = a.index(row, head, i);
    const PageEntry before = h.table[0][page];
    const std::int32_t fresh = s.pool[pool_of(0, a.codec)].at(run.taken + i);
    const std::byte* old_frame = frame_at(s, 0, before.frame);
    std::byte* new_frame = frame_at(s, 0, fresh);
    if constexpr (by_warps) {
#pragma unroll 1
      for (int side = 0; side < 2; ++side) lower_side(old_frame, from, new_frame, to, side == 0, lane);
      __syncwarp();
    } else {
      if constexpr (how == How::groups) {
        __shared__ HeldRanges ranges[2];
        const HeldRows<Own> keys(old_frame, from, true), values(old_frame, from, false);
        copy_fields(old_frame, from, new_frame, to, static_cast<int>(threadIdx.x), threads);
        keys.store(new_frame, to, ranges[0]), values.store(new_frame, to, ranges[1]);
      } else {
        encode_page(s, a.codec, before.frame, fresh);
      }
      __syncthreads();
      if (warp > 0) continue;
    }
    if (lane == 0) {
      h.table[0][page] = entry_of(fresh, before.tokens, a.codec);
      poison_frame(s, 0, before);
      s.pool[device_pool].at(run.back + i) = before.frame;
    }
    __syncwarp();
    if (s.summary != Summary::none) summarize_page(s, a.slots[row], head, page, (page + 1) * s.layout.page_size, lane);
  }
}

// A block stores a head's listed pages in another codec, one after the other, unless they are a run.
__global__ void __launch_bounds__(threads, 2)
    encode_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreEncode a) {
  const int row = blockIdx.x / s.kv_heads, head = blockIdx.x % s.kv_heads, p = s.layout.page_size;
  const int mine = static_cast<int>(threadIdx.x), warp = mine / 32, lane = mine % 32;
  const Head h = head_of(s, a.slots[row], head);
  wait_for_predecessor();
  if (a.runs && a.runs[blockIdx.x].pages > 0) return;
  const int n = *h.length, pages = (n + p - 1) / p, count = a.count(row, head);
  if (wrong_list(s, a, row, head, pages)) return;
  __shared__ PageEntry before, fresh;
  __shared__ bool changes;
  for (int i = 0; i < count; ++i) {
    // Pages that change places are never on the list behind the one that does.
    const int page = a.index(row, head, a.codec > 0 ? i : count - 1 - i);
    if (mine == 0) {
      before = h.table[0][page];
      changes = before.frame >= 0 && before.codec != a.codec && (page + 1) * p <= n &&
                (a.codec > 0 || *h.lower_pages * p <= n) && take(s, 0, fresh, before.tokens, store_no_frame, a.codec);
      if (before.frame < 0) fail(s, ops::page_absent);
    }
    __syncthreads();
    const bool goes = changes;
    if (goes) encode_page(s, a.codec, before.frame, fresh.frame);
    __syncthreads();
    if (!goes) continue;
    const int other = a.codec > 0 ? *h.lower_pages : *h.lower_pages - 1;
    __syncthreads();
    if (mine == 0) {
      h.table[0][page] = h.table[0][other];
      h.table[0][other] = fresh;
      *h.lower_pages = a.codec > 0 ? other + 1 : other;
      give_back(s, 0, before);
      count_fired(s, a.edit);
    }
    __syncthreads();
    if (warp < 2) summarize(s, h, warp ? other : page, min(p, n - (warp ? other : page) * p), lane);
    __syncthreads();
  }
}

}  // namespace

namespace cuda_store {

void plan_encode(const CudaStoreLayer& s, const CudaStoreEncode& e, Stream stream) {
  encode_plan_kernel<<<static_cast<unsigned>(e.rows * s.kv_heads), plan_threads, 0, stream_of(stream)>>>(s, e);
  check_launch("plan_encode");
}
KVLAB_ON_CUDA(plan_encode, plan_encode);

void encode(const CudaStoreLayer& s, const CudaStoreEncode& e, Stream to) {
  const cudaStream_t stream = stream_of(to);
  const auto heads = static_cast<unsigned>(e.rows * s.kv_heads);
  if (e.runs) {
    const PageLayout &from = e.codec > 0 ? s.layout : s.lower_layout, &as = e.codec > 0 ? s.lower_layout : s.layout;
    const bool lowers = only_lowers(from, as), groups = are_held(from, as, true) && are_held(from, as, false);
    // Blocks that are there at once share a run whose pages change by warps.
    const std::int64_t pages = e.index.extent[2], shares = lowers ? (pages + warps - 1) / warps : pages,
                       at_once = lowers ? std::int64_t{4} * multiprocessors() / heads : 1024;
    const int own = s.layout.page_size / warps;
    const auto kernel = lowers     ? encode_run_kernel<How::lowers>
                        : !groups  ? encode_run_kernel<How::any>
                        : own == 2 ? encode_run_kernel<How::groups, 2>
                                   : encode_run_kernel<How::groups, 4>;
    launch("encode", kernel,
           dim3(static_cast<unsigned>(std::clamp<std::int64_t>(shares, 1, std::max<std::int64_t>(1, at_once))), heads),
           threads, 0, stream, true, s, e);
  }
  launch("encode", encode_kernel, heads, threads, 0, stream, e.runs != nullptr, s, e);
}
KVLAB_ON_CUDA(encode, encode);

}  // namespace cuda_store
}  // namespace kvlab
