// Tokens of a head in kernels: how one moves between places, and how a head closes the holes of those that left.
#pragma once
#include "store/cuda_head.cuh"

namespace kvlab::device_store {

constexpr int most_fields = 8;  // 4-byte values that travel with a token: metadata, position, token state
constexpr int few = 8;          // evictions up to this size move the last tokens into the holes (CpuStore::keep_only)
__device__ inline int side_bytes(const PageLayout& l, bool key) { return static_cast<int>(ops::row_bytes(l, key)); }

// A token's bytes: units of 16 or 4 bytes of K, then of V. Its fields of 4 bytes come from field().
template <class Unit>
struct Token {
  static __device__ int units(const PageLayout& l) { return key_units(l) + side_bytes(l, false) / int{sizeof(Unit)}; }
  static __device__ Unit* unit(std::byte* frame, const PageLayout& l, int offset, int i) {
    const int keys = key_units(l);
    std::byte* side = i < keys ? frame + l.k + std::int64_t{offset} * side_bytes(l, true)
                               : frame + l.v + std::int64_t{offset} * side_bytes(l, false);
    return reinterpret_cast<Unit*>(side) + (i < keys ? i : i - keys);
  }

 private:
  static __device__ int key_units(const PageLayout& l) { return side_bytes(l, true) / int{sizeof(Unit)}; }
};

__device__ inline int fields_of(const PageLayout& l) {
  return 1 + l.state_columns + (l.codec.k.bits > 0) + (l.codec.v.bits > 0);
}
__device__ inline unsigned* field(std::byte* frame, const PageLayout& l, int offset, int i) {
  std::int64_t at;
  if (i == 0)
    at = l.positions;
  else if (i <= l.state_columns)
    at = l.state + std::int64_t{i - 1} * l.page_size * 4;
  else
    at = l.codec.k.bits && i == l.state_columns + 1 ? l.k_meta : l.v_meta;
  return reinterpret_cast<unsigned*>(frame + at) + offset;
}

// Scale and zero of codes that become shorter.
__device__ inline unsigned lowered_meta(unsigned meta, int ratio) {
  const float scale = __half2float(__ushort_as_half(static_cast<unsigned short>(meta)));
  return (meta & 0xffff0000u) | __half_as_ushort(__float2half_rn(ops::lowered_scale(scale, ratio)));
}

// A token between layouts in a warp's registers, converted as ops::copy_token does. Turns: 1 for rows of up to 128
// elements, else 2. Grouped: a layout may be so. Kernels that know better have fewer registers.
template <int Turns, bool Grouped>
class CarriedToken {
 public:
  __device__ void read(const std::byte* frame, const PageLayout& l, int offset, const PageLayout& to, int lane) {
    load(frame, l, offset, to, lane);
    convert(l, to, lane);
  }
  // Both halves of read, for tokens whose loads do not wait for each other.
  __device__ void load(const std::byte* frame, const PageLayout& l, int offset, const PageLayout& to, int lane) {
    const RowLanes at(l.head_dim, lane);
#pragma unroll
    for (int turn = 0; turn < Turns; ++turn) {
      if (turn >= at.turns) break;
      const bool key = at.key(turn);
      const CodecSide of = ops::side_of(l, key), as = ops::side_of(to, key);
      ratio_[turn] = of == as ? 1 : ops::code_ratio(of, as);             // the tiers have one dtype
      if (!at.there || (Grouped && as.grouped() && of != as)) continue;  // encode_groups writes those
      if (Grouped && of.grouped() && ratio_[turn] != 1) {
#pragma unroll
        for (int i = 0; i < lane_elements; ++i)
          words_[turn].word[i] = __float_as_uint(any_element(frame, l, key, offset, at.first + i));
        continue;
      }
      const int bytes = lane_bytes(of, l.dtype);
      words_[turn].load(frame + ops::row_offset(l, key, offset) + at.first / lane_elements * bytes, bytes);
      if (of.bits && !(Grouped && of.grouped()))
        meta_[turn] = *reinterpret_cast<const unsigned*>(frame + ops::meta_offset(l, key, offset));
    }
    if (lane <= l.state_columns) field_ = *field(const_cast<std::byte*>(frame), l, offset, lane);
  }
  __device__ void convert(const PageLayout& l, const PageLayout& to, int lane) {
    const RowLanes at(l.head_dim, lane);
#pragma unroll
    for (int turn = 0; turn < Turns; ++turn) {
      if (turn >= at.turns) break;
      const bool key = at.key(turn);
      const CodecSide of = ops::side_of(l, key), as = ops::side_of(to, key);
      if (!at.there || ratio_[turn] == 1 || (Grouped && (of.grouped() || as.grouped()))) continue;
      if (ratio_[turn] == 0) {
        float x[lane_elements];
        numbers_of(words_[turn], of, l.dtype, meta_[turn], x);
#pragma unroll
        for (int i = 0; i < lane_elements; ++i) words_[turn].word[i] = __float_as_uint(x[i]);
      } else if (ratio_[turn] > 1) {
        const LaneWords before = words_[turn];
        words_[turn].put_codes(as.bits, [&](int i) { return ops::lowered(before.code(of.bits, i), ratio_[turn]); });
      }
    }
  }
  __device__ void write(std::byte* frame, const PageLayout& l, int offset, int lane) const {
    const RowLanes at(l.head_dim, lane);
#pragma unroll
    for (int turn = 0; turn < Turns; ++turn) {
      if (turn >= at.turns) break;
      const bool key = at.key(turn);
      const CodecSide side = ops::side_of(l, key);
      // Half a warp may encode anew while the other copies. Both take part in the search for the least and the most.
      const bool anew = ratio_[turn] == 0 && !(Grouped && side.grouped());
      if (__any_sync(~0u, anew)) {
        RowParts<1> row = {{}, at.first, 0, at.there && anew};
#pragma unroll
        for (int i = 0; i < lane_elements; ++i) row.x[0][i] = __uint_as_float(words_[turn].word[i]);
        encode(frame, l, key, offset, row, at.lanes);
      }
      if (!at.there || ratio_[turn] == 0) continue;
      const int bytes = lane_bytes(side, l.dtype);
      words_[turn].store(frame + ops::row_offset(l, key, offset) + at.first / lane_elements * bytes, bytes);
      if (side.bits && !(Grouped && side.grouped()) && at.first == 0)
        *reinterpret_cast<unsigned*>(frame + ops::meta_offset(l, key, offset)) =
            ratio_[turn] == 1 ? meta_[turn] : lowered_meta(meta_[turn], ratio_[turn]);
    }
    if (lane <= l.state_columns) *field(frame, l, offset, lane) = field_;
  }

 private:
  // The lane's elements as both layouts store them, or the codes to come; numbers where they are encoded anew.
  LaneWords words_[Turns];
  unsigned meta_[Turns], field_;
  int ratio_[Turns];  // 1: stored alike. 0: encoded anew. Else ops::code_ratio
};
using Carried = CarriedToken<2, true>;

// Does the work of move_tokens where the tiers' layouts differ. Each warp moves one token at a time.
template <class From, class To>
__device__ void carry_tokens(const CudaStoreLayer& s, const Head& h, std::int32_t* rank, int begin, int end, From from,
                             To to) {
  const int p = s.layout.page_size, lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
  for (int first = begin; first < end; first += warps) {
    const bool mine = first + warp < end;
    const int a = mine ? from(first + warp) : 0, b = mine ? to(first + warp) : 0;
    const PageLayout& target = layout_at(s, h, b / p);
    Carried x;
    const std::int32_t r = mine && rank ? rank[a] : 0;
    if (mine) x.read(page_at(s, h, a / p), layout_at(s, h, a / p), a % p, target, lane);
    __syncthreads();
    if (mine) x.write(page_at(s, h, b / p), target, b % p, lane);
    if (mine && rank && lane == 0) rank[b] = r;
    __syncthreads();
  }
}

// Moves tokens of one head from place from(i) to to(i), i in [begin, end), tile by tile. No tile may write a place that
// a later one reads. rank [place] moves too, unless it is null.
template <class Unit, class From, class To>
__device__ void move_tokens(const CudaStoreLayer& s, const Head& h, std::int32_t* rank, int begin, int end, From from,
                            To to) {
  constexpr int each = 4;  // units that a thread holds
  const PageLayout& l = s.layout;
  const int p = l.page_size, units = Token<Unit>::units(l), fields = fields_of(l);
  const int threads = static_cast<int>(blockDim.x), tile = max(1, min(threads, threads * each / units));
  for (int first = begin; first < end; first += tile) {
    const int count = min(tile, end - first), all = count * units;
    Unit x[each];
    unsigned f[most_fields];
    std::int32_t r = 0;
    const int mine = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int j = 0; j < each; ++j)
      if (const int u = mine + j * threads; u < all) {
        const int t = from(first + u / units);
        x[j] = *Token<Unit>::unit(page_at(s, h, t / p), l, t % p, u % units);
      }
    if (mine < count) {
      const int t = from(first + mine);
      std::byte* frame = page_at(s, h, t / p);
#pragma unroll
      for (int i = 0; i < most_fields; ++i)
        if (i < fields) f[i] = *field(frame, l, t % p, i);
      if (rank) r = rank[t];
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < each; ++j)
      if (const int u = mine + j * threads; u < all) {
        const int t = to(first + u / units);
        *Token<Unit>::unit(page_at(s, h, t / p), l, t % p, u % units) = x[j];
      }
    if (mine < count) {
      const int t = to(first + mine);
      std::byte* frame = page_at(s, h, t / p);
#pragma unroll
      for (int i = 0; i < most_fields; ++i)
        if (i < fields) *field(frame, l, t % p, i) = f[i];
      if (rank) rank[t] = r;
    }
    __syncthreads();
  }
}

// A block takes `lost` of a head's tokens away. x.stays(i) is the place of the i-th token that stays, x.hole(i) the
// i-th place that a token leaves, both ascending. Holes matter up to the first at or above the count that stays.
template <class Unit, bool Mixed, class Places>
__device__ void close_holes(const CudaStoreLayer& s, const Head& h, int before, int lost, const Places& x,
                            std::int32_t* rank, unsigned long long edit, unsigned long long* last_edit) {
  if (lost <= 0) return;
  const int mine = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x), p = s.layout.page_size;
  const int count = before - lost;
  const int pages_before = (before + p - 1) / p, pages_after = (count + p - 1) / p;

  const auto move = [&](int begin, int end, auto from, auto to) {
    if constexpr (Mixed)
      carry_tokens(s, h, rank, begin, end, from, to);
    else
      move_tokens<Unit>(s, h, rank, begin, end, from, to);
  };
  int moves = 0;      // few losses: tokens that move
  int moved = count;  // many losses: the first place that gets another token
  if (lost <= few) {
    while (moves < lost && x.hole(moves) < count) ++moves;
    move(
        0, moves, [&](int i) { return x.stays(count - 1 - i); }, [&](int i) { return x.hole(i); });
  } else {
    moved = min(count, x.hole(0));
    move(
        moved, count, [&](int i) { return x.stays(i); }, [](int i) { return i; });
  }
  __syncthreads();

  for (int page = pages_after + mine; page < pages_before; page += threads)
    for (int tier = 0; tier < 2; ++tier) give_back(s, tier, h.table[tier][page]);
  const int last = pages_after - 1;
  const bool shorter = last >= 0 && min(before, pages_after * p) != count;
  if (mine == 0) {
    *h.length = count;
    if (h.lower_pages) *h.lower_pages = min(*h.lower_pages, pages_after);
    fewer_pages(s, pages_before - pages_after);
    if (shorter) {
      PageEntry& upper = h.table[0][last].frame >= 0 ? h.table[0][last] : h.table[1][last];
      upper.tokens = static_cast<std::uint16_t>(count - last * p);
    }
    count_fired(s, edit, last_edit);
  }
  __syncthreads();

  // Where a page's tokens have changed, the lower copy of a device page is stale, and so is the summary.
  const int warp = mine / 32, lane = mine % 32, all = threads / 32;
  const auto outdated = [&](int page) {
    if (lane == 0 && h.table[0][page].frame >= 0) give_back(s, 1, h.table[1][page]);
    summarize(s, h, page, min(p, count - page * p), lane);
  };
  for (int i = warp; i < moves; i += all)
    if (const int page = x.hole(i) / p; i == 0 || x.hole(i - 1) / p != page) outdated(page);
  if (moved < count) {
    for (int page = moved / p + warp; page <= last; page += all) outdated(page);
  } else if (shorter && warp == 0 && (moves == 0 || x.hole(moves - 1) / p != last)) {
    outdated(last);
  }
}

// A warp copies the first tokens of a page to a page of another layout. A call spares registers of kernels that seldom
// need it.
__device__ __noinline__ inline void carry_tokens(const std::byte* from, const PageLayout& of, std::byte* to,
                                                 const PageLayout& as, int tokens, int lane) {
  constexpr int at_once = 4;
  for (int first = 0; first < tokens; first += at_once) {
    Carried x[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i)
      if (first + i < tokens) x[i].read(from, of, first + i, as, lane);
#pragma unroll
    for (int i = 0; i < at_once; ++i)
      if (first + i < tokens) x[i].write(to, as, first + i, lane);
  }
}
__device__ inline void carry_page(const CudaStoreLayer& s, int to, std::int32_t frame_from, std::int32_t frame_to,
                                  int tokens, int lane) {
  carry_tokens(frame_at(s, 1 - to, frame_from), layout_of(s, 1 - to), frame_at(s, to, frame_to), layout_of(s, to),
               tokens, lane);
}

// Returns whether rows of both sides of a token are multiples of 16 bytes.
inline bool wide(const PageLayout& l) {
  return ops::row_bytes(l, true) % 16 == 0 && ops::row_bytes(l, false) % 16 == 0;
}

}  // namespace kvlab::device_store
