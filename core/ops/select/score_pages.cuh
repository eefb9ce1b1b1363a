// The tensor core kernels of page scores share their arguments, the output of a tile's sums, and the end of a head.
#pragma once
#include <kvlab/roles.hpp>

#include "base/lanes.cuh"
#include "base/line.cuh"
#include "ops/page/final_list.hpp"
#include "ops/select/candidates.hpp"
#include "ops/select/chosen_pages.hpp"
#include "ops/select/select_held.cuh"

namespace kvlab::ops::page_scores {

using device::all_lanes;
using device::SelectShared;

constexpr int threads = 256, warps = threads / 32, tile_pages = 16;
constexpr int chunk_bytes = 64;    // bytes of a summary that the four lanes of a row take at once
constexpr int chunk_numbers = 32;  // of a summary in 16 bits; two chunks of codes are 64 bytes

// Summaries of T, or with Codes in its place of codes (kvlab/kv.hpp, summary_bytes). Element: of the tensor cores.
// step_bytes divides all distances.
struct Codes {};
template <class T, int Chunks>
struct Format {
  using Element = T;
  static constexpr bool codes = false;
  static constexpr int page_bytes = Chunks * chunk_bytes, step_bytes = 128;
};
template <int Chunks>
struct Format<Codes, Chunks> {
  using Element = __half;  // which holds a code exactly
  static constexpr bool codes = true;
  static constexpr int scale_at = Chunks * chunk_numbers, page_bytes = scale_at + 16, step_bytes = 16;
};

// What a softmax over scores needs: the highest, and the sum of exp(score - high).
struct alignas(8) Softmax {
  float high = -INFINITY, sum = 0;
};
__device__ __forceinline__ Softmax joined(Softmax a, Softmax b) {
  const float high = fmaxf(a.high, b.high);
  const auto rest = [&](Softmax x) { return x.high == high ? x.sum : x.sum * expf(x.high - high); };
  return {high, rest(a) + rest(b)};
}
template <int Step>
__device__ __forceinline__ Softmax joined_lanes(Softmax x) {
  struct Join {
    __device__ __forceinline__ Softmax operator()(Softmax a, Softmax b) const { return joined(a, b); }
  };
  return cuda::join_lanes<Step, 16>(x, Join{});
}

struct Args {
  const std::int32_t* length;
  std::int64_t length_slot, length_head;
  const std::int32_t* slots;
  const float* queries;
  std::int64_t query_row, query_head;
  const std::byte* data;
  std::int64_t slot_stride, head_stride, page_stride;
  float* scores;
  std::int64_t score_row, score_head;
  // softmax_mean: [room, query head, tile] the highest score of each tile of pages, and [room, query head, raw_step]
  // exp(score - that one). The room of a head is its pair, or where a launch is of several layers Head::room. So
  // exponentials are taken where a block has a share of the pages, and each has one factor for a whole tile later.
  // Kernels without tiles keep scores in `raw`.
  float *highs, *raw;
  int raw_step;
  Softmax* shares;  // softmax_mean: [block, 2, group] of the heads that a block shares with the one before and after it
  const std::int32_t* budgets;
  std::int64_t budget_row, budget_head;
  std::int32_t *list, *count;      // null = no selection
  const std::int32_t* list_slots;  // [row] IndexList::slots
  std::int64_t list_row, list_head, list_step, count_row, count_head;
  int*
      arrived;  // [first block of a pair that blocks share] blocks that have finished their part; zero between launches
  int rows, kv_heads, group, dim, page_size, most_pages, room;
  int blocks_each;  // whole blocks that every pair could have; 0 = none
  cuda::PairOf pair_of;
  float scale;
  GroupRule rule;
  bool box, codes, newest;
  Heads heads;
  Pins leave_out;
  int budget;        // where `budgets` is null
  FiredCount fired;  // null members = not to be counted
  int first;         // candidates begin with this page; data and scores begin there too
  // Rows of several layers: row r of the launch is row (begin + r) % rows of layer (begin + r) / rows. The others are
  // the distances of two layers in memory. rows 0: one layer.
  struct Layers {
    int rows, begin;
    unsigned of_row, of_page;  // 2^32 / rows and 2^32 / page_size, rounded up: in place of divisions
    std::int64_t length, queries, data, flags, classes, list, count;
  } layers;

  // x / by, exact while x * by is less than 2^32. share: 2^32 / by, rounded up.
  static __device__ __forceinline__ int quotient(int x, int by, unsigned share) {
    return by == 1 ? x : static_cast<int>(std::uint64_t{share} * static_cast<unsigned>(x) >> 32);
  }
  __device__ __forceinline__ int layer_of(int row) const {
    return layers.rows ? quotient(layers.begin + row, layers.rows, layers.of_row) : 0;
  }
  __device__ __forceinline__ int row_of(int row) const {
    return layers.rows ? layers.begin + row - layer_of(row) * layers.rows : row;
  }
  // candidates(tokens, page_size, leave_out).count(), of several layers.
  __device__ __forceinline__ int candidates_of_layers(int tokens) const {
    const int whole = leave_out.last > 0 ? max(tokens - leave_out.last, 0) : tokens + page_size - 1;
    return max(quotient(whole, page_size, layers.of_page) - first, 0);
  }
  __device__ __forceinline__ Heads heads_of(int layer) const {
    Heads h = heads;
    if (h.flags.data) h.flags.data += layer * layers.flags;
    if (h.classes) h.classes += layer * layers.classes;
    return h;
  }
  __device__ __forceinline__ std::int64_t list_at(int row) const { return list_slots ? list_slots[row] : row; }
  __device__ __forceinline__ int budget_of(int row, int head) const {
    return budgets ? budgets[row * budget_row + head * budget_head] : budget;
  }
};

// Arguments of a scoring launch over all rows (score_pages.cu), without lists. write_to: the lists and budgets of rows
// from `begin` on.
Args args_of(const View<const float, 3>& queries, const PagedKv& kv, const Summaries& summaries, const PageChoice& c,
             const Scores& scores);
void write_to(Args& a, const View<const std::int32_t, 2>& budgets, const PageList& out, int begin);

// A head of which a block has tiles.
struct Head {
  int at, begin;  // on the line of pairs, and the tiles before it there
  int row, kv_head, pages, budget;
  int room;  // of its softmax_mean; see Args::raw
  float* scores;
};

// Bytes that hold a bit for each page, a multiple of 16.
__host__ __device__ constexpr int bit_bytes(int pages) { return ((pages + 31) / 32 + 3) / 4 * 16; }
// Bytes that hold a score for each page, a multiple of 16.
__host__ __device__ constexpr int score_bytes(int pages) { return (pages + 3) / 4 * 16; }

__device__ __forceinline__ int tiles_of(int pages) { return (pages + tile_pages - 1) / tile_pages; }
// Candidates of a head.
__device__ __forceinline__ int candidates_of(const Args& a, std::int64_t slot, int head, int layer = 0) {
  const int tokens = a.length[layer * a.layers.length + slot * a.length_slot + head * a.length_head];
  return min(candidates(tokens, a.page_size, a.leave_out).count(), a.most_pages);
}
// None in a head that is left out.
__device__ __forceinline__ int pages_of(const Args& a, std::int64_t slot, int head, int layer = 0) {
  const int pages = candidates_of(a, slot, head, layer);
  return a.heads_of(layer).on(static_cast<int>(slot), head) ? pages : 0;
}
// Writes the empty list of a head without candidates. The list of a head that is left out stays.
__device__ __forceinline__ void no_pages(const Args& a, int row, int head) {
  const int layer = a.layer_of(row), of = a.row_of(row);
  if (a.heads_of(layer).on(a.slots[of], head))
    a.count[layer * a.layers.count + a.list_at(of) * a.count_row + head * a.count_head] = 0;
}

// Where the block of a part of a pair keeps its Softmax of the pair's query heads, in Args::shares. A block has parts
// of at most two pairs that it shares.
template <class Line>
__device__ __forceinline__ std::int64_t place_of_share(const Line& line, int begin, int block, int group) {
  return (2 * std::int64_t{block} + (begin > line.part(block).begin)) * group;
}

// An element of the query for a row of the summary. For boxes max(q lo, q hi) = min(q, 0) lo + max(q, 0) hi.
__device__ __forceinline__ float box_query(const Args& a, float q, bool upper) {
  if (!a.box) return q;
  return upper ? fmaxf(q, 0.f) : fminf(q, 0.f);
}

// Codes are multiplied as halves, so a query head is first divided by a power of two, `grow`. sum: of its elements, for
// the codes' common zero.
struct QueryHead {
  float shrink, grow, sum;
};

// Finds those of all query heads. queries: shared memory, [head, dim].
__device__ __forceinline__ void sum_queries(const Args& a, const float* queries, QueryHead* to) {
  const int lane = threadIdx.x % 32, each = static_cast<int>(blockDim.x) / 32;
#pragma unroll 1
  for (int head = static_cast<int>(threadIdx.x) / 32; head < a.group; head += each) {
    float sum = 0, most = 0;
    for (int d = lane; d < a.dim; d += 32) {
      const float x = queries[head * a.dim + d];
      sum += x, most = fmaxf(most, fabsf(x));
    }
    sum = cuda::sum_of_lanes(sum), most = cuda::most_of_lanes(most);
    // The greatest element comes to between 2^12 and 2^13.
    const unsigned exponent = max(__float_as_uint(most) >> 23, 13u);
    if (lane == 0) to[head] = {__uint_as_float((266u - exponent) << 23), __uint_as_float((exponent - 12u) << 23), sum};
  }
}

// Page of a tile whose summary is row `row` of A, for rows below 8; row + 8 has the page + 8. Codes of pages are an odd
// number of 16 bytes apart. So rows that lanes read at once lie in different banks.
template <bool InCodes>
__device__ __forceinline__ int page_of_row(int row) {
  return InCodes ? row / 2 + row % 2 * 4 : row;
}

// Writes fragments of B as [column tile][chunk][lane], 8 elements of one column each, of the queries at q, `step`
// elements apart. Column 2 h is query head h rounded, column 2 h + 1 the rest. The four lanes of a row hold 8
// neighbouring elements each, of codes 16 of two chunks. So A and B share an order of the sum over k that is not the
// order in memory. of_head: for codes, what sum_queries found.
template <class T, bool InCodes = false>
__device__ __forceinline__ void stage_queries(const Args& a, const float* queries, std::int64_t step, int column_tiles,
                                              int chunks, uint4* fragments, const QueryHead* of_head = nullptr) {
#pragma unroll 1
  for (int i = threadIdx.x; i < column_tiles * chunks * 32; i += blockDim.x) {
    const int lane = i % 32, chunk = i / 32 % chunks, column = i / 32 / chunks * 8 + lane / 4;
    const int head = column / 2,
              element = InCodes ? chunk / 2 * 64 + lane % 4 * 16 + chunk % 2 * 8 : chunk * 32 + lane % 4 * 8;
    unsigned out[4] = {};
    if (head < a.group) {
      const bool upper = a.box && element >= a.dim;
      const float* q = queries + head * step + element;
      if (upper) q -= a.dim;
      float x[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] = q[e];
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] = box_query(a, InCodes ? x[e] * of_head[head].shrink : x[e], upper);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        out[k] = cuda::Pair<T>::pack(x[2 * k], x[2 * k + 1]);
        if (column % 2) {
          float rounded_x, rounded_y;
          cuda::Pair<T>::unpack(out[k], rounded_x, rounded_y);
          out[k] = cuda::Pair<T>::pack(x[2 * k] - rounded_x, x[2 * k + 1] - rounded_y);
        }
      }
    }
    fragments[i] = make_uint4(out[0], out[1], out[2], out[3]);
  }
}

// Multiplies a tile at shared memory `from`, as a bulk copy leaves it, with the fragments b. Lane 4 g + q gets the sums
// of pages g and g + 8, which write_tile takes.
template <class T, int Chunks, int Tiles>
__device__ __forceinline__ void multiply_tile(unsigned from, const uint4 (&b)[Tiles][Chunks], float (&sum)[Tiles][4]) {
  constexpr int page_bytes = Chunks * chunk_bytes;
  const int lane = threadIdx.x % 32, quarter = lane % 4;
  from += lane / 4 * page_bytes;
  float sums[Tiles][2][4] = {};
#pragma unroll
  for (int c = 0; c < Chunks; ++c) {
    const int swizzle = (lane / 4 * (page_bytes / 128) + c / 2) & 7;
    const unsigned at = from + c / 2 * 128 + ((c % 2 * 4 + quarter) ^ swizzle) * 16;
    const uint4 low = cuda::load_shared16(at), high = cuda::load_shared16(at + 8 * page_bytes);
#pragma unroll
    for (int t = 0; t < Tiles; ++t) {
      cuda::mma16816<T>(sums[t][0], low.x, high.x, low.y, high.y, b[t][c].x, b[t][c].y);
      cuda::mma16816<T>(sums[t][1], low.z, high.z, low.w, high.w, b[t][c].z, b[t][c].w);
    }
  }
#pragma unroll
  for (int t = 0; t < Tiles; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[t][i] = sums[t][0][i] + sums[t][1][i];
}

// Four codes as halves, two in a register. 0x6400 is 1024, whose last bit counts 1.
__device__ __forceinline__ uint2 halves_of(unsigned codes) {
  constexpr unsigned base = 0x64006400;
  return make_uint2(cuda::sub_halves(__byte_perm(codes, base, 0x5150), base),
                    cuda::sub_halves(__byte_perm(codes, base, 0x5352), base));
}

// The lane's query heads: grow and sum of head 4 t + lane % 4.
template <int Tiles>
__device__ __forceinline__ void load_heads(const Args& a, const QueryHead* of_head, float2 (&heads)[Tiles]) {
#pragma unroll
  for (int t = 0; t < Tiles; ++t) {
    const QueryHead& of = of_head[min(4 * t + static_cast<int>(threadIdx.x) % 4, a.group - 1)];
    heads[t] = make_float2(of.grow, of.sum);
  }
}

// The same for codes: sums of the scores themselves, of pages page_of_row(g) and page_of_row(g) + 8.
template <int Chunks, int Tiles>
__device__ __forceinline__ void multiply_codes(unsigned from, const uint4 (&b)[Tiles][Chunks],
                                               const float2 (&heads)[Tiles], float (&sum)[Tiles][4]) {
  using F = Format<Codes, Chunks>;
  static_assert(Chunks % 2 == 0);
  const int lane = threadIdx.x % 32;
  from += page_of_row<true>(lane / 4) * F::page_bytes;
  float sums[Tiles][2][4] = {};
#pragma unroll
  for (int c = 0; c < Chunks; c += 2) {
    const unsigned at = from + c * chunk_numbers + lane % 4 * 16;
    const uint4 low = cuda::load_shared16(at), high = cuda::load_shared16(at + 8 * F::page_bytes);
    const unsigned words[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint2 l0 = halves_of(words[0][2 * j]), l1 = halves_of(words[0][2 * j + 1]), h0 = halves_of(words[1][2 * j]),
                  h1 = halves_of(words[1][2 * j + 1]);
#pragma unroll
      for (int t = 0; t < Tiles; ++t) {
        cuda::mma16816<__half>(sums[t][0], l0.x, h0.x, l0.y, h0.y, b[t][c + j].x, b[t][c + j].y);
        cuda::mma16816<__half>(sums[t][1], l1.x, h1.x, l1.y, h1.y, b[t][c + j].z, b[t][c + j].w);
      }
    }
  }
  const uint2 shared[2] = {cuda::load_shared8(from + F::scale_at),
                           cuda::load_shared8(from + 8 * F::page_bytes + F::scale_at)};  // scale, zero
#pragma unroll
  for (int t = 0; t < Tiles; ++t)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto& [x, y] = sums[t];
      const float product = x[2 * half] + y[2 * half] + (x[2 * half + 1] + y[2 * half + 1]);
      sum[t][2 * half] =
          fmaf(product * heads[t].x, __uint_as_float(shared[half].x), heads[t].y * __uint_as_float(shared[half].y));
      sum[t][2 * half + 1] = 0;
    }
}

// Writes the scores of pages `page` and page + 8 to `scores` and, unless it is null, to `own`. The lane's sums of a
// tile lie as in C: column 2 h is query head h with the rounded query, and column 2 h + 1 with the rest. Where the rule
// is softmax_mean, Args::highs and Args::raw get them instead, and softmax[t] covers those of head 4 t + lane % 4.
// MayBeRaw: false = another rule.
template <bool MayBeRaw = true, int Tiles>
__device__ __forceinline__ void write_tile(const Args& a, const float (&sum)[Tiles][4], int room, int page, int pages,
                                           float* scores, float* own, Softmax (&softmax)[Tiles]) {
  const int quarter = threadIdx.x % 4;
  const auto there = [&](int half) { return page + 8 * half < pages; };
  if (MayBeRaw && a.rule == GroupRule::softmax_mean) {
#pragma unroll
    for (int t = 0; t < Tiles; ++t) {
      float x[2], of_lane = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        x[half] = there(half) ? (sum[t][2 * half] + sum[t][2 * half + 1]) * a.scale : -INFINITY;
      const float high = cuda::most_of_lanes<4, 16>(fmaxf(x[0], x[1]));
      const int head = t * 4 + quarter;
      if (head >= a.group) continue;
      const std::int64_t at = std::int64_t{room} * a.group + head;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!there(half)) continue;
        const float share = x[half] == high ? 1.f : expf(x[half] - high);
        a.raw[at * a.raw_step + page + 8 * half] = share;
        of_lane += share;
      }
      softmax[t] = joined(softmax[t], {high, of_lane});
      if (threadIdx.x % 32 < 4) a.highs[at * (a.raw_step / tile_pages) + page / tile_pages] = high;
    }
    return;
  }
  const float none = a.rule == GroupRule::max ? -INFINITY : 0.f;
  float best[2] = {none, none};
#pragma unroll
  for (int t = 0; t < Tiles; ++t) {
    if (t * 4 + quarter >= a.group) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float x = sum[t][2 * half] + sum[t][2 * half + 1];
      if (a.rule == GroupRule::max)
        best[half] = fmaxf(best[half], x);
      else
        best[half] += x;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    best[half] =
        a.rule == GroupRule::max ? cuda::most_of_lanes<1, 2>(best[half]) : cuda::sum_of_lanes<1, 2>(best[half]);
    if (a.rule == GroupRule::mean) best[half] *= 1.f / static_cast<float>(a.group);
  }
  if (quarter != 0) return;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (there(half)) {
      scores[page + 8 * half] = best[half];
      if (own) own[page + 8 * half] = best[half];
    }
}

// Joins the block's Softmax of each query head and writes them to out[group]. of_warp: shared memory, [4 * Tiles,
// Warps].
template <int Warps, int Tiles>
__device__ __forceinline__ void join_block(const Softmax (&of_lane)[Tiles], int group, Softmax* of_warp, Softmax* out) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int t = 0; t < Tiles; ++t) {
    const Softmax x = joined_lanes<4>(of_lane[t]);
    if (lane < 4) of_warp[(4 * t + lane) * Warps + warp] = x;
  }
  __syncthreads();
  const int head = threadIdx.x;
  if (head >= group) return;
  Softmax x;
  for (int w = 0; w < Warps; ++w) x = joined(x, of_warp[head * Warps + w]);
  out[head] = x;
}

// The Softmax of all parts of a head, of its parts in the lanes: the highest, and what an exponential is to be
// multiplied with. A head whose softmax does not exist adds nothing.
__device__ __forceinline__ Softmax factor_of(Softmax of_lane, int group) {
  const float high = cuda::most_of_lanes(of_lane.high),
              sum = cuda::sum_of_lanes(of_lane.high == high ? of_lane.sum : of_lane.sum * expf(of_lane.high - high));
  const bool none = high == -INFINITY || high == INFINITY;
  return {high, none ? 0.f : 1.f / (sum * static_cast<float>(group))};
}

// Makes the head's scores, the mean of its query heads' softmaxes, of their parts in `raw` and `highs`, which are the
// head's in Args. `own` is null or shared memory that gets them too. of_block: the query heads' factor_of.
__device__ __noinline__ inline void softmax_mean(const float* raw, const float* highs, int raw_step, int group,
                                                 int pages, float* out, float* own, const Softmax* of_block) {
  constexpr int together = 4;  // heads whose loads are under way at once
  for (int p = 4 * static_cast<int>(threadIdx.x); p < pages; p += 4 * threads) {
    float sum[4] = {};
#pragma unroll 1
    for (int head = 0; head < group; head += together) {
      float4 v[together];
      float high[together];
#pragma unroll
      for (int i = 0; i < together; ++i) {
        const int g = min(head + i, group - 1);
        v[i] = __ldcg(reinterpret_cast<const float4*>(raw + g * raw_step + p));
        high[i] = __ldcg(highs + g * (raw_step / tile_pages) + p / tile_pages);
      }
#pragma unroll
      for (int i = 0; i < together; ++i) {
        if (head + i >= group) break;
        const auto [most, factor] = of_block[head + i];
        const float of_tile = factor == 0 ? 0.f : expf(high[i] - most) * factor;
        if (of_tile == 0) continue;
        sum[0] += v[i].x * of_tile, sum[1] += v[i].y * of_tile, sum[2] += v[i].z * of_tile, sum[3] += v[i].w * of_tile;
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (p + e < pages) {
        out[p + e] = sum[e];
        if (own) own[p + e] = sum[e];
      }
  }
}

// Runs device::choose_pages; shares: see device::level. Unless it is null, `own` is shared memory that holds the scores
// too. stage is shared memory for a row and may be `own`.
__device__ __noinline__ inline int choose(const float* scores, const float* own, int n, int budget, bool newest,
                                          bool shares, std::int32_t* to, std::int64_t step, int room, float* stage,
                                          unsigned* chosen, SelectShared& s, int first) {
  const auto held = [&](auto vectors) {
    device::Held<threads, decltype(vectors)::value> row;
    row.shares = shares;
    own ? row.load_own(own, n) : row.load(scores, n);
    return device::choose_pages_held(row, scores, n, budget, newest, to, step, room, chosen, s, first);
  };
  if (n <= 4 * threads) return held(std::integral_constant<int, 1>());
  if (n <= 8 * threads) return held(std::integral_constant<int, 2>());
  if (n <= 16 * threads) return held(std::integral_constant<int, 4>());
  return device::choose_pages(scores, n, budget, newest, shares, to, step, room, stage, chosen, s, first);
}

// Selects a head's pages by its scores and writes the list. own, stage and chosen: see `choose`.
__device__ __forceinline__ void write_choice(const Args& a, const Head& head, const float* own, float* stage,
                                             unsigned* chosen, SelectShared& s) {
  const std::int64_t at = a.list_at(a.row_of(head.row));
  const int layer = a.layer_of(head.row);
  std::int32_t* list = a.list + layer * a.layers.list + at * a.list_row + head.kv_head * a.list_head;
  const bool shares = a.rule == GroupRule::softmax_mean;
  const int count = choose(head.scores, own, head.pages, head.budget, a.newest, shares, list, a.list_step, a.room,
                           stage, chosen, s, a.first);
  if (threadIdx.x == 0) {
    a.count[layer * a.layers.count + at * a.count_row + head.kv_head * a.count_head] = count;
    if (a.fired.fired && count != head.pages && atomicExch(a.fired.last_edit, a.fired.edit) != a.fired.edit)
      atomicAdd(a.fired.fired, 1ull);
  }
}

// A block calls this after its tiles of a head. Of the blocks that share the head, the last one sees all scores: it
// reduces those of the query heads where the rule wants it, and selects where there is a list. All threads meet before
// it ends. stage is shared memory; it holds the scores if own is true and the block has the whole head. merges is a
// word of shared memory.
template <class Line, int Tiles>
__device__ __forceinline__ void end_head(const Args& a, const Line& line, const Head& head, bool own,
                                         const Softmax (&softmax)[Tiles], float* stage, unsigned* chosen, int& merges,
                                         SelectShared& s) {
  const bool raw = a.rule == GroupRule::softmax_mean;
  const int begin = head.begin, first_block = line.first_block(head.at),
            parts = line.last_block(head.at) - first_block + 1;
  const bool shared = parts > 1 && (a.list || raw);
  static_assert((warps + 1) * 4 * Tiles <= device::most_candidates);
  // No selection runs yet, so its candidates' memory is free.
  Softmax *of_warp = reinterpret_cast<Softmax*>(s.candidate), *of_block = of_warp + warps * 4 * Tiles;
  if (raw)
    join_block<warps>(softmax, a.group, of_warp,
                      shared ? a.shares + place_of_share(line, begin, blockIdx.x, a.group) : of_block);
  __syncthreads();
  if (!a.list && !raw) return;
  if (shared) {
    if (threadIdx.x == 0) {
      merges = cuda::add_released(a.arrived + first_block, 1) == parts - 1;
      if (merges) a.arrived[first_block] = 0;
    }
    __syncthreads();
    if (!merges) return;
  }
  if (raw) {
    const int lane = threadIdx.x % 32;
    for (int g = threadIdx.x / 32; g < a.group; g += warps) {
      Softmax x;
      if (parts == 1) {
        if (lane == 0) x = of_block[g];
      } else {
        for (int part = lane; part < parts; part += 32) {
          const float2 of = __ldcg(
              reinterpret_cast<const float2*>(a.shares + place_of_share(line, begin, first_block + part, a.group) + g));
          x = joined(x, {of.x, of.y});
        }
      }
      x = factor_of(x, a.group);
      if (lane == 0) of_block[g] = x;
    }
    __syncthreads();
    const std::int64_t first_head = std::int64_t{head.room} * a.group;
    softmax_mean(a.raw + first_head * a.raw_step, a.highs + first_head * (a.raw_step / tile_pages), a.raw_step, a.group,
                 head.pages, head.scores, a.list ? stage : nullptr, of_block);
    __threadfence_block();
    __syncthreads();
  }
  if (a.list) write_choice(a, head, raw || (own && !shared) ? stage : nullptr, stage, chosen, s);
}

}  // namespace kvlab::ops::page_scores
