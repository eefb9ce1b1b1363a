// Scores of pages, the choice, and attention to it, in one launch. A group of blocks has a (row, KV head) pair. Each
// block finds whether the head chooses. It scores a share of its candidates and waits for the scores of the others.
// Then each makes the same choice, from all scores, and attends to a share of the pages that are read. The last block
// merges the results.
//
// Apart, these are two or three launches. Each of them waits for its lengths and tables, and for its last blocks.
//
// All blocks of a group are under way at once, because the grid is no larger than the room of the multiprocessors. No
// block of a later kernel takes that room before all of them have begun. Copies for rows that sit the step out may hold
// multiprocessors, so some blocks of a group begin late, which costs time alone. A larger grid has groups of one block.
#include <algorithm>

#include "base/lanes.cuh"
#include "base/scratch.cuh"
#include "base/tensor_map.hpp"
#include "ops/attend/attend.cuh"
#include "ops/attend/attend_plain.cuh"
#include "ops/page/paged.hpp"
#include "ops/retrieve/attend_chosen.hpp"
#include "ops/select/score_pages_ring.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;
using device::Held;
using device::SelectShared;
using page_scores::chunk_bytes;
using page_scores::multiply_tile;
using page_scores::Softmax;
using page_scores::tile_pages;

constexpr int threads = 128, warps = threads / 32, stages = 2, most_group = 8;
constexpr int blocks_of_multiprocessor = 3, most_parts = 16, most_pages = 2048, most_tiles = most_pages / tile_pages,
              max_pairs = 1024;

struct FusedArgs {
  page_scores::Args choose;
  decode::Args attend;
  bool chooses;  // false = the lists are there
  Pins pins;
  const std::int32_t *list, *count;  // where choose.list and choose.count are, for heads that do not choose
  std::int32_t *out, *out_count;     // [row, kv_head, i] pages that were read; null = nobody asks
  std::int64_t out_row, out_head, out_count_row;
  FiredCount fired;
  std::int32_t* error;
  std::int32_t bad_count, bad_entry;
  int *scored, *merged;  // [pair] blocks that have come so far; zero between launches
  int page_step;         // rows of the maps from a page's summary to the next one; of codes, steps of 16 bytes
  int parts;             // blocks of a pair
  bool dense;            // summaries have no gaps between them
  // turned_heads comes first; `last` becomes the queries. last: [slot, query head, Dim], null = the flags are there.
  float* last;
  std::int64_t last_slot, last_head;
  std::uint8_t* turned;  // [slot, kv_head], Heads::flags of the choice
  std::int64_t turned_slot, turned_head;
  float threshold;
};

// Order of dynamic shared memory: the stages of all warps, their barriers, the fragments of a pair's queries, and the
// queries. The selection works in the stages. The list of chosen pages takes the place of fragments and queries.
template <class T, int Dim, int Chunks, int Tiles, bool InCodes>
struct Room {
  using F = page_scores::Format<std::conditional_t<InCodes, page_scores::Codes, T>, Chunks>;
  static constexpr int page_bytes = F::page_bytes, tile_bytes = tile_pages * page_bytes;
  static constexpr int stage_bytes = std::max(tile_bytes, UnitShape<Dim>::unit_bytes),
                       ring_bytes = warps * stages * stage_bytes;
  static constexpr int barriers_at = ring_bytes, fragments_at = barriers_at + warps * stages * 8,
                       queries_at = fragments_at + Tiles * Chunks * 512;
  static constexpr int bytes(int group) {
    return std::max(queries_at + group * Dim * 4, fragments_at + most_pages * int{sizeof(std::uint16_t)});
  }
  // Factors of the choice lie at the end of the ring, and the selection at its start.
  static constexpr int factors_at = ring_bytes - most_group * most_tiles * int{sizeof(float)};
  static_assert(factors_at >= int{sizeof(SelectShared)} && fragments_at % 16 == 0 && stage_bytes % 1024 == 0);
};

using Row = Held<threads, most_pages / threads / 4>;

// The mean of the query heads' softmaxes of n pages, into the thread's entries. factors: shared memory,
// [most_group, most_tiles].
__device__ __forceinline__ void load_shares(Row& row, const page_scores::Args& c, int pair, int parts, int n,
                                            Softmax* of_head, float* factors) {
  constexpr int together = 4, vectors = Row::each / 4;  // heads whose loads are under way at once
  static_assert(most_parts <= 32 && most_tiles <= threads && tile_pages % 4 == 0);
  const int lane = threadIdx.x % 32, mine = threadIdx.x, tiles = page_scores::tiles_of(n);
  const std::int64_t first_head = std::int64_t{pair} * c.group;
#pragma unroll
  for (int i = 0; i < Row::each; ++i) row.x[i] = 0;
#pragma unroll 1
  for (int head = 0; head < c.group; head += together) {
    float4 v[together][vectors];
    float high[together];
    const auto on = [&](int g) { return head + g < c.group; };
#pragma unroll
    for (int g = 0; g < together; ++g) {
      const std::int64_t at = first_head + head + g;
      high[g] = on(g) && mine < tiles ? __ldcg(c.highs + at * (c.raw_step / tile_pages) + mine) : 0.f;
#pragma unroll
      for (int j = 0; j < vectors; ++j)
        v[g][j] = on(g) && Row::index(4 * j) < n
                      ? __ldcg(reinterpret_cast<const float4*>(c.raw + at * c.raw_step + Row::index(4 * j)))
                      : make_float4(0, 0, 0, 0);
    }
    if (head == 0) {
      for (int g = mine / 32; g < c.group; g += warps) {
        Softmax x;
        if (lane < parts) {
          const float2 of =
              __ldcg(reinterpret_cast<const float2*>(c.shares + (std::int64_t{pair} * parts + lane) * c.group + g));
          x = {of.x, of.y};
        }
        x = page_scores::factor_of(x, c.group);
        if (lane == 0) of_head[g] = x;
      }
      __syncthreads();
    }
#pragma unroll
    for (int g = 0; g < together; ++g) {
      if (!on(g) || mine >= tiles) continue;
      const auto [most, factor] = of_head[head + g];
      factors[(head + g) * most_tiles + mine] = factor == 0 ? 0 : expf(high[g] - most) * factor;
    }
    __syncthreads();
#pragma unroll
    for (int g = 0; g < together; ++g) {
#pragma unroll
      for (int j = 0; j < vectors; ++j) {
        if (!on(g) || Row::index(4 * j) >= n) continue;
        const float factor = factors[(head + g) * most_tiles + Row::index(4 * j) / tile_pages];
        if (factor == 0) continue;
        float* sum = row.x + 4 * j;
        sum[0] += v[g][j].x * factor, sum[1] += v[g][j].y * factor;
        sum[2] += v[g][j].z * factor, sum[3] += v[g][j].w * factor;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < Row::each; ++i)
    if (Row::index(i) >= n) row.x[i] = NAN;
}

// Whether the head's queries turned, as turned_heads finds it. The whole block calls it; cosines: shared memory.
template <int Dim>
__device__ __forceinline__ bool has_turned(const FusedArgs& f, int row, int slot, int kv_head, float* cosines) {
  const page_scores::Args& c = f.choose;
  const int lane = threadIdx.x % 32;
  for (int g = threadIdx.x / 32; g < c.group; g += warps) {
    const float* now = c.queries + row * c.query_row + (kv_head * c.group + g) * c.query_head;
    const float* then = f.last + slot * f.last_slot + (kv_head * c.group + g) * f.last_head;
    float dot = 0, a = 0, b = 0;
#pragma unroll
    for (int d = 0; d < Dim; d += 32) {
      const float x = now[d + lane], y = then[d + lane];
      dot += x * y, a += x * x, b += y * y;
    }
    dot = sum_of_lanes(dot), a = sum_of_lanes(a), b = sum_of_lanes(b);
    if (lane == 0) cosines[g] = dot / (sqrtf(a) * sqrtf(b) + 1e-12f);
  }
  __syncthreads();
  float sum = 0;
  for (int g = 0; g < c.group; ++g) sum += cosines[g];
  return sum / static_cast<float>(c.group) < f.threshold;
}

// The pages that a head reads, ascending: [0, sinks), those of the list in between, [recent, pages).
struct Reading {
  int sinks, recent, pages, low, high;  // low, high: of the list

  __device__ __forceinline__ int count() const { return sinks + high - low + pages - recent; }
  __device__ __forceinline__ int page(const std::uint16_t* list, int i) const {
    if (i < sinks) return i;
    i -= sinks;
    return i < high - low ? list[low + i] : recent + i - (high - low);
  }
};

// Entries of the ascending list that are below x.
__device__ __forceinline__ int below(const std::uint16_t* list, int count, int x) {
  int low = 0, high = count;
#pragma unroll 1
  while (low < high) {
    const int mid = (low + high) / 2;
    if (list[mid] < x)
      low = mid + 1;
    else
      high = mid;
  }
  return low;
}

template <class T, int Dim, int Chunks, int Tiles, bool Shares, bool InCodes>
__global__ void __launch_bounds__(threads, blocks_of_multiprocessor)
    attend_chosen_kernel(const __grid_constant__ FusedArgs f, const __grid_constant__ CUtensorMap tile_map,
                         const __grid_constant__ CUtensorMap page_map, const __grid_constant__ CUtensorMap unit_map) {
  using R = Room<T, Dim, Chunks, Tiles, InCodes>;
  using Rows = decode::PlainRows<T, Dim, 1, false>;
  using P = decode::Partial<Dim, 1>;
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ int merges;
  __shared__ Softmax of_head[most_group];
  __shared__ float cosines[most_group];
  __shared__ page_scores::QueryHead asks[most_group];
  const page_scores::Args& c = f.choose;
  const decode::Args& a = f.attend;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
  const unsigned my_stages = shared_address(memory) + warp * stages * R::stage_bytes;
  const unsigned my_barriers = shared_address(memory) + R::barriers_at + warp * stages * 8;
  uint4* fragments = reinterpret_cast<uint4*>(memory + R::fragments_at);
  float* queries = reinterpret_cast<float*>(memory + R::queries_at);
  auto* list = reinterpret_cast<std::uint16_t*>(memory + R::fragments_at);
  SelectShared& select = *reinterpret_cast<SelectShared*>(memory);
  if (lane == 0) {
#pragma unroll
    for (int s = 0; s < stages; ++s) barrier_init(my_barriers + 8 * s, 1);
    barrier_init_fence();
  }
  __syncwarp();
  let_successor_start();
  if (threadIdx.x == 0) {
    if (!InCodes) fetch_map(&tile_map);
    fetch_map(&unit_map);
  }
  if (static_cast<int>(threadIdx.x) < a.rows) keep_load(a.slots[threadIdx.x]);  // into L1; no kernel writes them
  wait_for_predecessor();
  const std::uint64_t policy = read_once_policy();
  decode::Place here;

#pragma unroll 1
  for (int item = blockIdx.x; item < a.rows * a.kv_heads * f.parts; item += gridDim.x) {
    const int pair = f.parts == 1 ? item : item / f.parts, part = item - pair * f.parts;
    const int row = a.pair_of.row(pair), kv_head = pair - row * a.kv_heads, slot = a.slots[row];
    const int tokens = a.length[slot * a.length_slot + kv_head * a.length_head],
              pages = min((tokens + a.page_size - 1) / a.page_size, most_pages);
    const bool turned = f.last && has_turned<Dim>(f, row, slot, kv_head, cosines),
               chooses = f.last ? turned != c.heads.unflagged : f.chooses && c.heads.on(slot, kv_head);
    const int n = chooses ? page_scores::candidates_of(c, slot, kv_head) : 0;
    const PageEntry* entries = a.table + slot * a.table_slot + kv_head * a.table_head;

    // Scores of the block's candidates.
    const int tiles = page_scores::tiles_of(n), first_tile = tiles * part / f.parts,
              last_tile = tiles * (part + 1) / f.parts;
    const int summary = static_cast<int>((slot * c.slot_stride + kv_head * c.head_stride) / R::F::step_bytes);
    const auto copy_tile = [&](int tile, int stage) {
      if (tile >= last_tile) return;
      const int page = tile * tile_pages, count = min(tile_pages, n - page), y = summary + page * f.page_step;
      const unsigned to = my_stages + stage * R::stage_bytes, barrier = my_barriers + 8 * stage;
      const std::byte* from = InCodes ? c.data + std::int64_t{y} * R::F::step_bytes : nullptr;
      if (f.dense && (InCodes || count == tile_pages)) {
        if (!elect_lane()) return;
        barrier_expect(barrier, count * R::page_bytes);
        if constexpr (InCodes)
          bulk_load(to, from, count * R::page_bytes, barrier, policy);
        else
          bulk_copy_2d(to, &tile_map, 0, y, barrier, policy);
        return;
      }
      if (lane == 0) barrier_expect(barrier, count * R::page_bytes);
      __syncwarp();
      if (lane >= count) return;
      if constexpr (InCodes)
        bulk_load(to + lane * R::page_bytes, from + lane * c.page_stride, R::page_bytes, barrier, policy);
      else
        bulk_copy_2d(to + lane * R::page_bytes, &page_map, 0, y + lane * f.page_step, barrier, policy);
    };
    const auto after = [](int stage) { return stage + 1 == stages ? 0 : stage + 1; };
    float* scores = c.scores + row * c.score_row + kv_head * c.score_head;
    if (n > 0) {
      for (int i = 0, stage = here.stage; i < stages; ++i, stage = after(stage))
        copy_tile(first_tile + warp + i * warps, stage);
      const float* from = c.queries + row * c.query_row + kv_head * c.group * c.query_head;
      for (int i = threadIdx.x * 4; i < c.group * Dim; i += threads * 4)
        copy_async16(shared_address(queries + i), from + i / Dim * c.query_head + i % Dim);
      // Entries of chosen pages are looked up later. They come to the L2 cache meanwhile.
      constexpr int of_line = 128 / int{sizeof(PageEntry)};
      for (int page = (part * threads + threadIdx.x) * of_line; page < pages; page += f.parts * threads * of_line)
        fetch_line(entries + page);
      wait_copies();
      __syncthreads();
      float2 heads[Tiles];
      if constexpr (InCodes) {
        page_scores::sum_queries(c, queries, asks);
        __syncthreads();
        page_scores::load_heads(c, asks, heads);
      }
      page_scores::stage_queries<typename R::F::Element, InCodes>(c, queries, Dim, Tiles, Chunks, fragments, asks);
      __syncthreads();
      uint4 b[Tiles][Chunks];
#pragma unroll
      for (int t = 0; t < Tiles; ++t)
#pragma unroll
        for (int i = 0; i < Chunks; ++i) b[t][i] = fragments[(t * Chunks + i) * 32 + lane];
      Softmax softmax[Tiles];
#pragma unroll 1
      for (int tile = first_tile + warp; tile < last_tile; tile += warps) {
        barrier_wait(my_barriers + 8 * here.stage, here.odd);
        float sum[Tiles][4];
        if constexpr (InCodes)
          page_scores::multiply_codes(my_stages + here.stage * R::stage_bytes, b, heads, sum);
        else
          multiply_tile<T>(my_stages + here.stage * R::stage_bytes, b, sum);
        __syncwarp();
        copy_tile(tile + stages * warps, here.stage);
        here.next(stages);
        page_scores::write_tile<Shares>(c, sum, pair, tile * tile_pages + page_scores::page_of_row<InCodes>(lane / 4),
                                        n, scores, nullptr, softmax);
      }
      if constexpr (Shares) {
        __syncthreads();
        page_scores::join_block<warps>(
            softmax, c.group, reinterpret_cast<Softmax*>(memory),
            c.shares + (std::int64_t{pair} * f.parts + part) * c.group);  // [pair, part, group]
      }
    }
    // The queries' loads of attention end while the block waits for the others.
    float4 asked[1][Dim / 16];
    {
      const float* from = a.queries + row * a.query_row + (kv_head * a.group + min(g, a.group - 1)) * a.query_head;
#pragma unroll
      for (int i = 0; i < Dim / 16; ++i)
        asked[0][i] = *reinterpret_cast<const float4*>(from + Rows::query_element(q, 4 * i));
    }
    Rows rows(a, asked, a.group, g, q);
    __syncthreads();
    if (n > 0 && f.parts > 1) {
      if (threadIdx.x == 0) {
        add_released(f.scored + pair, 1);
        wait_for_value(f.scored + pair, f.parts);
      }
      __syncthreads();
    }

    // The choice, or the list of before.
    int count;
    if (chooses) {
      Row held;
      if constexpr (Shares) {
        load_shares(held, c, pair, f.parts, n, of_head, reinterpret_cast<float*>(memory + R::factors_at));
        // The scores of the block's own pages.
#pragma unroll
        for (int i = 0; i < Row::each; ++i)
          if (const int at = Row::index(i); at < n && at >= first_tile * tile_pages && at < last_tile * tile_pages)
            scores[at] = held.x[i];
      } else {
        held.load(scores, n);
      }
      const int pinned = c.newest && n > 0, wanted = min(c.budget_of(row, kv_head), n) - pinned;
      if (pinned) held.pin(n, [&](int i) { return i == n - 1; });
      if (pinned + wanted >= n)
        held.choose_all(n);
      else if (wanted > 0)
        held.select_by_halves(wanted, n, select);
      count = held.write(list, 1, most_pages, select, c.first);
    } else {
      const std::int64_t at = c.list_at(row);
      count = f.count[at * c.count_row + kv_head * c.count_head];
      if (count < 0 || count > min(c.room, most_pages)) {
        if (threadIdx.x == 0 && f.error) atomicOr(f.error, f.bad_count);
        count = 0;
      }
      const std::int32_t* from = f.list + at * c.list_row + kv_head * c.list_head;
      for (int i = threadIdx.x; i < count; i += threads) {
        const int page = from[i * c.list_step];
        if ((page < 0 || page >= pages) && f.error) atomicOr(f.error, f.bad_entry);
        list[i] = static_cast<std::uint16_t>(min(max(page, 0), max(pages - 1, 0)));
      }
    }
    before_bulk_copies();  // they write where the selection has
    __syncthreads();
    Reading reading;
    {
      const Pins& pins = f.pins;
      reading.pages = pages;
      reading.sinks = pins.first > 0 ? (min(pins.first, tokens) + a.page_size - 1) / a.page_size : 0;
      reading.recent = pins.last > 0 ? max(0, tokens - pins.last) / a.page_size : pages;
      if (pins.newest_page) reading.recent = min(reading.recent, max(0, tokens - 1) / a.page_size);
      reading.sinks = min(reading.sinks, pages);
      reading.recent = max(min(reading.recent, pages), reading.sinks);
      reading.low = reading.sinks > 0 ? below(list, count, reading.sinks) : 0;
      reading.high = reading.recent < pages ? below(list, count, reading.recent) : count;
    }
    const int read_pages = reading.count();

    // Attention to the block's share of the pages.
    const bool newest = read_pages > 0 && reading.page(list, read_pages - 1) == pages - 1;
    const int listed = read_pages * a.page_size - (newest ? pages * a.page_size - tokens : 0),
              units = (listed + unit_tokens - 1) / unit_tokens;
    const int first = units * part / f.parts + warp, end = units * (part + 1) / f.parts;
    const int items = first < end ? (end - first + warps - 1) / warps : 0;
    const int shift = __ffs(a.page_size / unit_tokens) - 1;
    // Row of the map of the i-th unit of the warp, if the lane is i % 32.
    const auto locate = [&](int i) {
      if (i + lane >= items) return 0;
      const int unit = first + (i + lane) * warps, at = unit >> shift, frame = entries[reading.page(list, at)].frame;
      if (frame < 0 && f.error) atomicOr(f.error, page_absent);
      return max(frame, 0) + (unit - (at << shift)) * Rows::unit_rows;
    };
    int ahead = locate(0);
    const auto issue = [&](int i, int stage) {
      const int y = __shfl_sync(~0u, ahead, i % 32);
      if (elect_lane())
        Rows::copy(a, &unit_map, my_stages + stage * R::stage_bytes, y, -1, my_barriers + 8 * stage, policy);
    };
    for (int i = 0, stage = here.stage; i < stages && i < items; ++i, stage = after(stage)) issue(i, stage);
    decode::LaneResult<Dim, 1> result;
    float(&high)[1][2] = result.high, (&sum)[1][2] = result.sum;
    high[0][0] = high[0][1] = -INFINITY, sum[0][0] = sum[0][1] = 0;
    const int tile_row = Rows::token_of(g);
#pragma unroll 1
    for (int i = 0; i < items; ++i) {
      const unsigned at = my_stages + here.stage * R::stage_bytes;
      const int valid = min(unit_tokens, listed - (first + i * warps) * unit_tokens);
      barrier_wait(my_barriers + 8 * here.stage, here.odd);
      float s[1][4];
      rows.score(at, s);
      if (valid < unit_tokens)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (tile_row + 8 * (e / 2) >= valid) s[0][e] = -INFINITY;
      rows.add(at, valid, s, high, sum);
      const int freed = here.stage, next = i + stages;
      here.next(stages);
      __syncwarp();
      if (next % 32 == 0) ahead = locate(next);
      if (next < items) issue(next, freed);
    }
    rows.finish();
#pragma unroll
    for (int t = 0; t < Dim / 16; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e) result.o[0][t][e] = rows.o[0][t][e];
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[0][h] = sum_of_lanes<4, 16>(sum[0][h]);

    // Results meet: those of the warps in shared memory, those of the blocks in global memory.
    const auto slot_of = [&](int w) {
      return decode::Slot<Dim>{reinterpret_cast<float*>(memory + w * stages * R::stage_bytes), a.group};
    };
    slot_of(warp).template put<Rows>(result, 0, g, q);
    __syncthreads();
    float* const of_pair = a.partial + std::int64_t{pair} * f.parts * 2 * P::floats;
#pragma unroll 1
    for (int x = threadIdx.x; x < a.group * (Dim / 4); x += threads) {
      const int head = x / (Dim / 4);
      decode::Running r;
#pragma unroll
      for (int w = 0; w < warps; ++w) r.high = fmaxf(r.high, slot_of(w).high(head));
#pragma unroll
      for (int w = 0; w < warps; ++w) {
        const decode::Slot<Dim> of_warp = slot_of(w);
        r.add(of_warp.high(head), of_warp.sum(head), of_warp.chunk(head, x % (Dim / 4)));
      }
      if (f.parts == 1) {
        decode::put_result<T, Dim>(a, pair, x, r);
        continue;
      }
      float* partial = of_pair + part * 2 * P::floats;
      if (x % (Dim / 4) == 0) reinterpret_cast<float2*>(partial)[head] = make_float2(r.high, r.sum);
      reinterpret_cast<float4*>(partial + 2 * P::heads)[x] = r.out;
    }
    if (f.parts > 1) {
      __syncthreads();
      if (threadIdx.x == 0) merges = add_released(f.merged + pair, 1) == f.parts - 1;
      __syncthreads();
    }
    // What others read later: the first block has the least to do at the end.
    if (part == 0) {
      if (chooses) {
        const std::int64_t at = c.list_at(row);
        std::int32_t* to = c.list + at * c.list_row + kv_head * c.list_head;
        for (int i = threadIdx.x; i < count; i += threads) to[i * c.list_step] = list[i];
        if (threadIdx.x == 0) c.count[at * c.count_row + kv_head * c.count_head] = count;
      }
      if (f.last && threadIdx.x == 0) f.turned[slot * f.turned_slot + kv_head * f.turned_head] = turned;
      if (f.out) {
        std::int32_t* to = f.out + row * f.out_row + kv_head * f.out_head;
        for (int i = threadIdx.x; i < read_pages; i += threads) to[i] = reading.page(list, i);
        if (threadIdx.x == 0) f.out_count[row * f.out_count_row + kv_head] = read_pages;
      }
      if (threadIdx.x == 0 && f.fired.fired && read_pages != pages &&
          atomicExch(f.fired.last_edit, f.fired.edit) != f.fired.edit)
        atomicAdd(f.fired.fired, 1ull);
    }
    if (f.last && (f.parts == 1 || merges)) {  // all blocks of the head have read them
      const float* from = c.queries + row * c.query_row + kv_head * c.group * c.query_head;
      float* to = f.last + slot * f.last_slot + kv_head * c.group * f.last_head;
      for (int i = threadIdx.x; i < c.group * Dim; i += threads)
        to[i / Dim * f.last_head + i % Dim] = from[i / Dim * c.query_head + i % Dim];
    }
    if (f.parts > 1 && merges) {
      if (threadIdx.x == 0) f.merged[pair] = f.scored[pair] = 0;
      decode::merge_parts<T, Dim, 1>(a, pair, of_pair, of_pair, f.parts, memory, R::ring_bytes);
    }
    before_bulk_copies();
    __syncthreads();
  }
}

template <class T, int Dim, int Chunks, int Tiles, bool Shares, bool InCodes>
void launch_kernel(FusedArgs f, const CUtensorMap& unit_map, Stream s) {
  using R = Room<T, Dim, Chunks, Tiles, InCodes>;
  const auto kernel = attend_chosen_kernel<T, Dim, Chunks, Tiles, Shares, InCodes>;
  static const cudaError_t once =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, R::bytes(most_group));
  check(once, "attend_chosen");
  constexpr bool half = std::is_same_v<T, __half>;
  constexpr std::int64_t any = 0x7fffffff;  // no bound is needed: the kernel copies only pages that exist
  page_scores::Args& c = f.choose;
  const void* summaries = f.chooses ? static_cast<const void*>(c.data) : f.attend.base;
  CUtensorMap tile_map = {}, page_map = {};  // codes need none
  if constexpr (!InCodes) {
    constexpr int page_rows = R::page_bytes / 128;
    tile_map = matrix_map(summaries, half, any, 64, 64, tile_pages * page_rows);
    page_map = matrix_map(summaries, half, any, 64, 64, page_rows);
  }
  constexpr std::int64_t of_system = 1024, own = 2048;  // bytes of each block that CUDA takes; static ones, aligned
  const int bytes = R::bytes(f.attend.group), pairs = f.attend.rows * f.attend.kv_heads,
            blocks = step_multiprocessors() *
                     static_cast<int>(std::min<std::int64_t>(blocks_of_multiprocessor,
                                                             (shared_bytes() + of_system) / (bytes + of_system + own)));
  f.parts = std::clamp(blocks / pairs, 1, most_parts);
  if (Shares) {
    c.raw_step = (c.most_pages + tile_pages - 1) / tile_pages * tile_pages;
    const auto rows = static_cast<std::size_t>(pairs) * static_cast<std::size_t>(c.group);
    c.raw = static_cast<float*>(
        fixed_scratch(s.handle(), "chosen scores", rows * static_cast<std::size_t>(c.raw_step) * sizeof(float)));
    c.highs = static_cast<float*>(fixed_scratch(
        s.handle(), "chosen highs", rows * static_cast<std::size_t>(c.raw_step / tile_pages) * sizeof(float)));
    c.shares = static_cast<Softmax*>(
        fixed_scratch(s.handle(), "chosen softmax", rows * static_cast<std::size_t>(f.parts) * sizeof(Softmax)));
  }
  cuda::launch("attend_chosen", kernel, std::min(pairs * f.parts, blocks), threads, bytes, stream_of(s), true, f,
               tile_map, page_map, unit_map);
}

template <class T, int Dim, int Chunks, int Tiles, bool InCodes = false>
void launch_rule(const FusedArgs& f, const CUtensorMap& unit_map, Stream s) {
  f.chooses&& f.choose.rule == GroupRule::softmax_mean
      ? launch_kernel<T, Dim, Chunks, Tiles, true, InCodes>(f, unit_map, s)
      : launch_kernel<T, Dim, Chunks, Tiles, false, InCodes>(f, unit_map, s);
}

template <class T>
void launch_shape(const FusedArgs& f, int dim, const CUtensorMap& unit_map, Stream s) {
  const bool box = !f.chooses || f.choose.box, wide = f.attend.group > 4;
  if (f.chooses && f.choose.codes) {  // of boxes
    if (dim == 64) return launch_rule<T, 64, 4, 2, true>(f, unit_map, s);
    return wide ? launch_rule<T, 128, 8, 2, true>(f, unit_map, s) : launch_rule<T, 128, 8, 1, true>(f, unit_map, s);
  }
  if (dim == 128) {
    if (box) return wide ? launch_rule<T, 128, 8, 2>(f, unit_map, s) : launch_rule<T, 128, 8, 1>(f, unit_map, s);
    return launch_rule<T, 128, 4, 2>(f, unit_map, s);
  }
  box ? launch_rule<T, 64, 4, 2>(f, unit_map, s) : launch_rule<T, 64, 2, 2>(f, unit_map, s);
}

bool serves(const AttendArgs& in) {
  const PagedKv& kv = in.kv;
  const PageLayout& l = kv.layouts[0];
  return !in.tokens && !in.bias && attend_pipelined(in) && l.codec.k.bits == 0 && l.codec.v.bits == 0 &&
         !kv.lower_pages && (kv.head_dim == 64 || kv.head_dim == 128) && kv.page_size >= unit_tokens &&
         kv.rope != RopeRegime::cache_relative && in.window == 0 && in.most_distance == 0 && !in.mass &&
         !in.logits.out && kv.rows * kv.kv_heads <= max_pairs && in.queries.extent[1] <= most_group * kv.kv_heads;
}

bool serves(const PagedKv& kv, const Summaries& summaries, const page_scores::Args& c) {
  return kv.layouts[0].dtype == summaries.dtype && page_scores::fits_ring(c) && (c.box || !c.codes) &&
         reinterpret_cast<std::uintptr_t>(c.data) % 16 == 0 && reinterpret_cast<std::uintptr_t>(c.queries) % 16 == 0 &&
         c.query_row % 4 == 0 && c.query_head % 4 == 0;
}

}  // namespace

static bool attend_chosen_cuda(const AttendArgs& in, const ChosenRead& read, Stream s) {
  const PutOffChoice* choice = read.choice;
  const std::int64_t pages =
      choice ? choice->kv.table.extent[2] : in.kv.table.extent[2];  // of the longest head, at most
  if (!serves(in) || pages > most_pages) return false;
  // Blocks that choose wait for one another, and other work holds the multiprocessors that a step leaves free.
  if (choice && step_multiprocessors() != multiprocessors()) return false;
  FusedArgs f = {};
  f.chooses = choice != nullptr;
  if (choice) {
    f.choose =
        page_scores::args_of(choice->queries.f32(), choice->kv, choice->summaries, choice->choice, choice->scores);
    if (!serves(choice->kv, choice->summaries, f.choose)) return false;
    f.page_step = static_cast<int>(choice->summaries.page_stride / page_scores::step_bytes_of(f.choose));
    f.dense = choice->summaries.page_stride == page_scores::row_bytes_of(f.choose);
  }
  if (const PutOffTurns* t = read.turns) {
    if (t->queries.f32().data != choice->queries.f32().data || t->kv.slots != choice->kv.slots ||
        t->kv.rows != in.kv.rows)
      return false;
    f.last = t->last.data, f.last_slot = t->last.stride[0], f.last_head = t->last.stride[1];
    f.turned = t->turned.data, f.turned_slot = t->turned.stride[0], f.turned_head = t->turned.stride[1];
    f.threshold = t->threshold;
  }
  if (in.kv.rows == 0) return true;
  page_scores::write_to(f.choose, choice ? choice->choice.budgets : View<const std::int32_t, 2>{}, read.list, 0);
  f.list = read.list.index.data, f.count = read.list.count.data;
  f.pins = read.pins, f.fired = read.fired;
  if (read.out.index) {
    f.out = read.out.index.data, f.out_count = read.out.count.data;
    f.out_row = read.out.index.stride[0], f.out_head = read.out.index.stride[1];
    f.out_count_row = read.out.count.stride[0];
  }
  f.error = in.kv.error, f.bad_count = read.bad_count, f.bad_entry = read.bad_entry;
  f.attend = decode::args_of(in, in.kv.layouts[0], s);
  decode::set_rows(f.attend, in, 0, in.kv.rows);
  auto* counters = static_cast<int*>(zeroed(s.handle(), "attend chosen", 2 * max_pairs * sizeof(int)));
  f.scored = counters, f.merged = counters + max_pairs;
  const CUtensorMap& unit_map = decode::map_of_units(in.kv, f.attend);
  f.attend.half ? launch_shape<__half>(f, in.kv.head_dim, unit_map, s)
                : launch_shape<__nv_bfloat16>(f, in.kv.head_dim, unit_map, s);
  return true;
}
KVLAB_ON_CUDA(attend_chosen, attend_chosen_cuda);

}  // namespace kvlab::ops
