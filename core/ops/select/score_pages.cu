// Page scores; with a list, the same launch also selects. Tiles of 16 pages of all heads lie on one line, which the
// resident blocks share evenly. A warp multiplies a tile with the queries of its KV head on the tensor cores. The block
// that writes the last scores of a head selects its pages. This file chooses the kernel. It has the kernel for shapes
// that the rings (score_pages_ring.cuh) do not take, and the kernel for any shape.
#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "base/lanes.cuh"
#include "base/scratch.cuh"
#include "ops/score/reduce_pages.cuh"
#include "ops/select/chosen_pages.hpp"
#include "ops/select/score_pages_ring.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;
using namespace device;
using namespace page_scores;

constexpr int most_column_tiles = 4;  // tiles of 8 columns; a query takes two columns: its rounded value and the rest
constexpr int max_pairs = 1024;       // pairs (row, KV head) of one launch; see PairOf

__device__ __forceinline__ int pages_of_pair(const Args& a, int pair) {
  return pages_of(a, a.slots[pair / a.kv_heads], pair % a.kv_heads);
}

template <class T, int Chunks>
__global__ void __launch_bounds__(threads, Chunks > 8 ? 1 : 2) score_kernel(const __grid_constant__ Args a) {
  extern __shared__ uint4 dynamic[];
  __shared__ SelectShared select;
  __shared__ int merges;
  const int column_tiles = (2 * a.group + 7) / 8, pairs = a.rows * a.kv_heads;
  uint4* fragments = dynamic;
  int* first = reinterpret_cast<int*>(fragments + column_tiles * Chunks * 32);  // [pairs + 1] tiles before each pair
  unsigned* chosen = reinterpret_cast<unsigned*>(first + (pairs + 4) / 4 * 4);
  float* stage = reinterpret_cast<float*>(chosen + bit_bytes(a.most_pages) / 4);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quarter = lane % 4;
  unsigned total = 0;
  for (int base = 0; base < pairs; base += threads) {
    const int pair = base + threadIdx.x, pages = pair < pairs ? pages_of_pair(a, pair) : 0;
    unsigned sum;
    const unsigned before = block_scan(tiles_of(pages), select.scan, sum);
    if (pair < pairs) {
      first[pair] = static_cast<int>(total + before);
      if (pages == 0 && a.list && blockIdx.x == 0) no_pages(a, pair / a.kv_heads, pair % a.kv_heads);
    }
    total += sum;
  }
  if (threadIdx.x == 0) first[pairs] = static_cast<int>(total);
  __syncthreads();
  const auto first_tile = [first](int i) { return first[i]; };
  const Line line(first_tile, pairs, 0, 0);
  const auto part = line.part(blockIdx.x);
  const int lo = part.begin, hi = part.end;
  if (lo >= hi) return;
  int pair = line.pair_of(lo);
  for (; pair < pairs && first[pair] < hi; ++pair) {
    const int begin = first[pair], end = first[pair + 1];
    if (begin == end) continue;
    const int row = pair / a.kv_heads, kv_head = pair % a.kv_heads, pages = pages_of_pair(a, pair);
    const int from = max(lo, begin), to = min(hi, end);
    const std::byte* summaries = a.data + a.slots[row] * a.slot_stride + kv_head * a.head_stride + quarter * 16;
    float* scores = a.scores + row * a.score_row + kv_head * a.score_head;
    // The lane reads rows lane / 4 and lane / 4 + 8 of a tile. Rows past the last page read that page again.
    const auto row_of = [&](int tile, int half) {
      return summaries + min((tile - begin) * tile_pages + lane / 4 + 8 * half, pages - 1) * a.page_stride;
    };
    Softmax softmax[most_column_tiles];
    int tile = from + warp;
    uint4 low[Chunks], high[Chunks];
    if (tile < to) {
      const std::byte *r0 = row_of(tile, 0), *r1 = row_of(tile, 1);
#pragma unroll
      for (int c = 0; c < Chunks; ++c) {
        low[c] = load_once16(r0 + c * chunk_bytes);
        high[c] = load_once16(r1 + c * chunk_bytes);
      }
    }
    stage_queries<T>(a, a.queries + row * a.query_row + kv_head * a.group * a.query_head, a.query_head, column_tiles,
                     Chunks, fragments);
    __syncthreads();
    const unsigned fragment = shared_address(fragments + lane);
    while (tile < to) {
      const int next = tile + warps;
      const bool more = next < to;
      const std::byte *r0 = row_of(more ? next : tile, 0), *r1 = row_of(more ? next : tile, 1);
      float sum[most_column_tiles][4] = {};
#pragma unroll
      for (int c = 0; c < Chunks; ++c) {
#pragma unroll
        for (int t = 0; t < most_column_tiles; ++t)
          if (t < column_tiles) {
            const uint4 b = load_shared16(fragment + (t * Chunks + c) * 512);
            mma16816<T>(sum[t], low[c].x, high[c].x, low[c].y, high[c].y, b.x, b.y);
            mma16816<T>(sum[t], low[c].z, high[c].z, low[c].w, high[c].w, b.z, b.w);
          }
        if (more) {
          low[c] = load_once16(r0 + c * chunk_bytes);
          high[c] = load_once16(r1 + c * chunk_bytes);
        }
      }
      const int page = (tile - begin) * tile_pages + lane / 4;
      write_tile(a, sum, pair, page, pages, scores, nullptr, softmax);
      tile = next;
    }
    const int budget = a.list ? a.budget_of(row, kv_head) : 0;
    end_head(a, line, Head{pair, begin, row, kv_head, pages, budget, pair, scores}, false, softmax, stage, chosen,
             merges, select);
  }
}

__device__ __forceinline__ float summary_element(const Args& a, const std::byte* summary, DType dtype, int d) {
  if (a.codes) {
    const float* shared = reinterpret_cast<const float*>(summary + (a.box ? 2 : 1) * a.dim);  // scale, zero
    return __fadd_rn(__fmul_rn(static_cast<float>(static_cast<unsigned char>(summary[d])), shared[0]), shared[1]);
  }
  if (dtype == DType::f32) return reinterpret_cast<const float*>(summary)[d];
  if (dtype == DType::f16) return __half2float(reinterpret_cast<const __half*>(summary)[d]);
  return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(summary)[d]);
}

// Serves any head_dim, element type, group and stride. One warp scores a page.
__global__ void __launch_bounds__(threads, 4) score_any_kernel(const __grid_constant__ Args a, DType dtype) {
  const int lane = threadIdx.x % 32, kv_head = blockIdx.y, row = blockIdx.z;
  const int pages = pages_of(a, a.slots[row], kv_head), width = a.box ? 2 * a.dim : a.dim;
  const bool raw = a.rule == GroupRule::softmax_mean;
  for (int page = blockIdx.x * warps + threadIdx.x / 32; page < pages; page += gridDim.x * warps) {
    const std::byte* summary = a.data + a.slots[row] * a.slot_stride + kv_head * a.head_stride + page * a.page_stride;
    float best = 0;
    for (int g = 0; g < a.group; ++g) {
      const int head = kv_head * a.group + g;
      const float* q = a.queries + row * a.query_row + head * a.query_head;
      float x = 0;
      for (int e = lane; e < width; e += 32) {
        const bool upper = a.box && e >= a.dim;
        x += box_query(a, q[upper ? e - a.dim : e], upper) * summary_element(a, summary, dtype, e);
      }
      x = sum_of_lanes(x);
      if (raw && lane == 0) a.raw[(std::int64_t(row) * a.kv_heads * a.group + head) * a.raw_step + page] = x;
      best = g == 0 ? x : a.rule == GroupRule::max ? fmaxf(best, x) : best + x;
    }
    if (a.rule == GroupRule::mean) best *= 1.f / static_cast<float>(a.group);
    if (!raw && lane == 0) a.scores[row * a.score_row + kv_head * a.score_head + page] = best;
  }
}

// length[slot, head] = tokens of as many whole pages as the head has candidates.
__global__ void __launch_bounds__(threads)
    candidate_kernel(const std::int32_t* slots, int rows, int kv_heads, int page_size,
                     View<const std::int32_t, 2> tokens, const __grid_constant__ Heads heads, Pins leave_out,
                     std::int32_t* length) {
  const int i = static_cast<int>(blockIdx.x) * threads + static_cast<int>(threadIdx.x);
  if (i >= rows * kv_heads) return;
  const int row = i / kv_heads, head = i % kv_heads, slot = slots[row];
  const int n = heads.on(slot, head) ? candidates(tokens(slot, head), page_size, leave_out).count() : 0;
  length[std::int64_t{slot} * kv_heads + head] = n * page_size;
}

__global__ void __launch_bounds__(threads)
    move_lists_kernel(const __grid_constant__ PageList from, const __grid_constant__ PageList to,
                      const std::int32_t* slots, const __grid_constant__ Heads heads, int first) {
  const int head = blockIdx.x, row = blockIdx.y;
  if (!heads.on(slots[row], head)) return;
  const std::int64_t at = to.at(row);
  const int count = from.count(row, head);
  for (int i = threadIdx.x; i < count; i += threads) to.index(at, head, i) = from.index(row, head, i) + first;
  if (threadIdx.x == 0) to.count(at, head) = count;
}

__global__ void __launch_bounds__(threads) fill_kernel(std::int32_t* to, int n, std::int32_t value) {
  const int i = static_cast<int>(blockIdx.x) * threads + static_cast<int>(threadIdx.x);
  if (i < n) to[i] = value;
}

std::size_t most_blocks() { return 2 * static_cast<std::size_t>(multiprocessors()); }

template <class T, int Chunks>
void launch(const Args& a, cudaStream_t stream) {
  const int pairs = a.rows * a.kv_heads, column_tiles = (2 * a.group + 7) / 8;
  int bytes = column_tiles * Chunks * 512 + (pairs + 4) / 4 * 16;
  if (a.list) bytes += bit_bytes(a.most_pages) + score_bytes(a.most_pages);
  const auto kernel = score_kernel<T, Chunks>;
  static const cudaError_t once = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                       static_cast<int>(shared_bytes() - sizeof(SelectShared) - 1024));
  check(once, "page_score");
  const bool two = Chunks <= 8 && 2 * (bytes + static_cast<int>(sizeof(SelectShared)) + 2048) < 224 * 1024;
  kernel<<<multiprocessors() * (two ? 2 : 1), threads, bytes, stream>>>(a);
  check_launch("page_score");
}

template <class T>
void launch_width(const Args& a, cudaStream_t stream) {
  switch (chunks_of(a)) {
    case 2: return launch<T, 2>(a, stream);
    case 3: return launch<T, 3>(a, stream);
    case 4: return launch<T, 4>(a, stream);
    case 6: return launch<T, 6>(a, stream);
    case 8: return launch<T, 8>(a, stream);
    default: return launch<T, 16>(a, stream);
  }
}

static_assert(most_column_tiles == 4 && max_pairs == 1024 && most_ring_group == 8 && most_ring_pairs == 768,
              "scores_by_tiles holds these bounds");

}  // namespace

// Selects with kernels of their own, where the scores of a head do not fit the fused one. They see each head's
// candidates as its pages and write a list of the rows; `finish` moves it to `out`.
struct Apart {
  PagedKv kv;
  PageList list;

  Apart(const PagedKv& of, const PageChoice& c, std::int64_t room, Stream s) : kv(of) {
    const std::int64_t slots = of.length.extent[0], heads = of.kv_heads;
    auto* length = static_cast<std::int32_t*>(
        fixed_scratch(s.handle(), "candidates", static_cast<std::size_t>(slots * heads) * sizeof(std::int32_t)));
    auto* lists = static_cast<std::int32_t*>(fixed_scratch(
        s.handle(), "candidate lists", static_cast<std::size_t>(of.rows * heads * (room + 1)) * sizeof(std::int32_t)));
    candidate_kernel<<<(of.rows * of.kv_heads + threads - 1) / threads, threads, 0, stream_of(s)>>>(
        of.slots, of.rows, of.kv_heads, of.page_size, of.length, c.heads, c.leave_out, length);
    check_launch("candidates");
    kv.length = View<const std::int32_t, 2>::dense(length, {slots, heads});
    list.index = View<std::int32_t, 3>::dense(lists, {of.rows, heads, room});
    list.count = View<std::int32_t, 2>::dense(lists + of.rows * heads * room, {of.rows, heads});
  }
  void finish(const PageChoice& c, const PageList& out, int first, Stream s) const {
    move_lists_kernel<<<dim3(kv.kv_heads, kv.rows), threads, 0, stream_of(s)>>>(list, out, kv.slots, c.heads, first);
    check_launch("candidate lists");
  }
};

Args page_scores::args_of(const View<const float, 3>& queries, const PagedKv& kv, const Summaries& summaries,
                          const PageChoice& c, const Scores& scores) {
  const int first = first_candidate(c.leave_out, kv.page_size);
  Args a = {};
  a.length = kv.length.data;
  a.length_slot = kv.length.stride[0], a.length_head = kv.length.stride[1];
  a.query_row = queries.stride[0], a.query_head = queries.stride[1];
  a.data = summaries.data + first * summaries.page_stride;
  a.slot_stride = summaries.slot_stride, a.head_stride = summaries.head_stride, a.page_stride = summaries.page_stride;
  a.score_row = scores.stride[0], a.score_head = scores.stride[1];
  a.rows = kv.rows, a.kv_heads = kv.kv_heads, a.pair_of = PairOf(kv.kv_heads),
  a.group = static_cast<int>(queries.extent[1]) / kv.kv_heads, a.dim = kv.head_dim;
  a.page_size = kv.page_size;
  a.most_pages = static_cast<int>(std::max<std::int64_t>(0, std::min(kv.table.extent[2], scores.extent[2]) - first));
  a.rule = c.rule, a.scale = c.scale;
  a.box = summary_vectors(summaries.kind) == 2, a.codes = summaries.bits == 8;
  a.newest = c.newest_page && c.leave_out.last <= 0;
  a.heads = c.heads, a.leave_out = c.leave_out, a.budget = c.budget, a.first = first;
  a.slots = kv.slots, a.queries = queries.data, a.scores = scores.data + first;
  return a;
}

void page_scores::write_to(Args& a, const View<const std::int32_t, 2>& budgets, const PageList& out, int begin) {
  a.budget_row = budgets.stride[0], a.budget_head = budgets.stride[1];
  if (budgets) a.budgets = budgets.data + begin * a.budget_row;
  a.list_row = out.index.stride[0], a.list_head = out.index.stride[1], a.list_step = out.index.stride[2];
  a.count_row = out.count.stride[0], a.count_head = out.count.stride[1];
  a.room = static_cast<int>(out.index.extent[2]);
  a.list = out.index.data, a.count = out.count.data;
  if (out.slots)
    a.list_slots = out.slots + begin;
  else
    a.list += begin * a.list_row, a.count += begin * a.count_row;
}

// Gives the rule softmax_mean memory for the scores of so many query heads.
static void make_softmax(Args& a, std::int64_t query_heads, Stream s) {
  if (a.rule != GroupRule::softmax_mean) return;
  a.raw_step = (a.most_pages + tile_pages - 1) / tile_pages * tile_pages;
  const auto scores = static_cast<std::size_t>(query_heads * a.raw_step),
             tiles = static_cast<std::size_t>(query_heads * (a.raw_step / tile_pages)),
             shares = 2 * most_blocks() * std::size_t(a.group);
  a.raw = static_cast<float*>(fixed_scratch(s.handle(), "page scores", scores * sizeof(float)));
  a.highs = static_cast<float*>(fixed_scratch(s.handle(), "page score highs", tiles * sizeof(float)));
  a.shares = static_cast<Softmax*>(fixed_scratch(s.handle(), "page softmax", shares * sizeof(Softmax)));
}

// Where out is null, it only scores.
static void run(const View<const float, 3>& queries, const PagedKv& of, const Summaries& summaries, const PageChoice& c,
                const Scores& of_scores, const PageList* out, Stream s) {
  if (of.rows == 0) return;
  PagedKv kv = of;
  const GroupRule rule = c.rule;
  const float scale = c.scale;
  const int first = first_candidate(c.leave_out, kv.page_size), heads = static_cast<int>(queries.extent[1]);
  Scores scores = of_scores;
  scores.data += first;
  scores.extent[2] = std::max<std::int64_t>(0, scores.extent[2] - first);
  const cudaStream_t stream = stream_of(s);
  Args a = args_of(queries, kv, summaries, c, of_scores);
  View<const std::int32_t, 2> budgets = c.budgets;
  const bool tiles = scores_by_tiles(kv, summaries, a.group), fused = tiles && out && a.most_pages <= most_fused_pages;
  make_softmax(a, std::int64_t{kv.rows} * heads, s);
  std::optional<Apart> apart;
  if (out && !fused) {
    apart.emplace(kv, c, out->index.extent[2], s);
    kv = apart->kv;
    if (!budgets) {
      auto* same = static_cast<std::int32_t*>(fixed_scratch(
          s.handle(), "page budgets", static_cast<std::size_t>(kv.rows * kv.kv_heads) * sizeof(std::int32_t)));
      fill_kernel<<<(kv.rows * kv.kv_heads + threads - 1) / threads, threads, 0, stream>>>(same, kv.rows * kv.kv_heads,
                                                                                           c.budget);
      check_launch("page budgets");
      budgets = View<const std::int32_t, 2>::dense(same, {kv.rows, kv.kv_heads});
    }
  }
  const auto select = [&] {
    if (!apart) return;
    top_pages_cuda(kv, scores, budgets, {0, 0, a.newest}, apart->list, s);
    apart->finish(c, *out, first, s);
  };
  if (!tiles) {
    const int chunks = std::max(1, std::min((a.most_pages + warps - 1) / warps, 2048 / (kv.rows * kv.kv_heads) + 1));
    score_any_kernel<<<dim3(chunks, kv.kv_heads, kv.rows), threads, 0, stream>>>(a, summaries.dtype);
    check_launch("page_score");
    if (a.raw)
      reduce_pages_cuda(kv,
                        View<const float, 3>{
                            a.raw, {kv.rows, heads, a.most_pages}, {std::int64_t{heads} * a.raw_step, a.raw_step, 1}},
                        rule, scale, scores, s);
    return select();
  }
  a.arrived = static_cast<int*>(zeroed(s.handle(), "page scores arrived", max_pairs * sizeof(int)));
  FinalList* final = fused && is_final(kv, c, of_scores, *out) ? out->final : nullptr;
  if (final) a.fired = final->count;
  const bool ring = fits_ring(a), f16 = summaries.dtype == DType::f16;
  const int at_once = (ring ? most_ring_pairs : max_pairs) / kv.kv_heads;
  for (int begin = 0; begin < kv.rows; begin += at_once) {
    Args b = a;
    b.rows = std::min(at_once, kv.rows - begin);
    b.slots += begin;
    b.queries += begin * a.query_row;
    b.scores += begin * a.score_row;
    if (a.raw) {
      b.raw += std::int64_t{begin} * heads * a.raw_step;
      b.highs += std::int64_t{begin} * heads * (a.raw_step / tile_pages);
    }
    if (fused) write_to(b, budgets, *out, begin);
    if (ring)
      launch_ring<false>(b, f16, stream);
    else
      f16 ? launch_width<__half>(b, stream) : launch_width<__nv_bfloat16>(b, stream);
  }
  if (final) final->set(*out, kv);
  select();
}

// What choices of layers that share launches have in common.
static auto common_of(const PutOffChoice& c) {
  const View<const float, 3> q = c.queries.f32();
  const Heads& h = c.choice.heads;
  return std::tuple(
      std::tuple(c.kv.rows, c.kv.kv_heads, c.kv.head_dim, c.kv.page_size, c.kv.slots, c.kv.length.stride,
                 c.kv.table.extent[2], q.extent, q.stride, c.scores.extent[2], c.stream.handle()),
      std::tuple(c.summaries.kind, c.summaries.dtype, c.summaries.bits, c.summaries.slot_stride,
                 c.summaries.head_stride, c.summaries.page_stride, c.out.index.extent, c.out.index.stride,
                 c.out.count.stride, c.out.slots),
      std::tuple(c.choice.rule, c.choice.scale, c.choice.budget, c.choice.budgets.data, c.choice.newest_page,
                 c.choice.leave_out.first, c.choice.leave_out.last, h.flags.data != nullptr, h.flags.stride,
                 h.unflagged, h.steps, h.period, h.lead, h.classes != nullptr, h.join));
}

// Rows of all layers that one launch takes.
static std::int64_t layer_rows_at_once(int kv_heads) {
  constexpr int exact = 1 << 20;  // PairOf
  return std::min(most_layer_pairs, exact / kv_heads - 1) / kv_heads;
}

// Distances of the layers' memory, or nullopt where they are not constant or the rest differs.
static std::optional<Args::Layers> layers_of(const std::vector<PutOffChoice>& all) {
  const auto common = common_of(all[0]);
  for (const PutOffChoice& c : all)
    if (common_of(c) != common) return {};
  bool constant = true;
  const auto distance = [&](const auto& of) {
    const std::int64_t step = of(all[1]) - of(all[0]);
    for (std::size_t i = 1; i < all.size(); ++i) constant = constant && of(all[i]) - of(all[i - 1]) == step;
    return step;
  };
  Args::Layers l = {};
  l.rows = all[0].kv.rows;
  const auto share = [](int by) { return static_cast<unsigned>(((std::int64_t{1} << 32) + by - 1) / by); };
  l.of_row = share(l.rows), l.of_page = share(all[0].kv.page_size);
  l.length = distance([](const PutOffChoice& c) { return c.kv.length.data; });
  l.queries = distance([](const PutOffChoice& c) { return c.queries.f32().data; });
  l.data = distance([](const PutOffChoice& c) { return c.summaries.data; });
  l.flags = distance([](const PutOffChoice& c) { return c.choice.heads.flags.data; });
  l.classes = distance([](const PutOffChoice& c) { return c.choice.heads.classes; });
  l.list = distance([](const PutOffChoice& c) { return c.out.index.data; });
  l.count = distance([](const PutOffChoice& c) { return c.out.count.data; });
  // The kernel counts rows of 128 bytes upwards, or 16 bytes of codes, reads queries 16 bytes at once, and fills all
  // lists at once.
  if (!constant || l.data < 0 || l.data % (all[0].summaries.bits == 8 ? 16 : 128) || l.queries % 4 || l.list == 0 ||
      l.count == 0)
    return {};
  return l;
}

static void chosen_in_layers_cuda(const std::vector<PutOffChoice>& all) {
  const PutOffChoice& first = all[0];
  const PagedKv& kv = first.kv;
  const Stream s = first.stream;
  const cudaStream_t stream = stream_of(s);
  const int heads = static_cast<int>(first.queries.f32().extent[1]), group = heads / kv.kv_heads;
  Scores scores = first.scores;
  const auto scores_for = [&](std::int64_t rows, std::int64_t kv_heads) {
    const std::int64_t count = rows * kv_heads * scores.extent[2];
    auto* room = static_cast<float*>(
        fixed_scratch(s.handle(), "scores in layers", static_cast<std::size_t>(count) * sizeof(float)));
    return Scores::dense(room, {rows, kv_heads, scores.extent[2]});
  };
  Args a = {};
  std::optional<Args::Layers> layers;
  const std::int64_t most_tokens = kv.table.extent[2] * kv.page_size;
  if (all.size() > 1 && kv.rows > 0 && !first.choice.budgets && kv.kv_heads <= most_ring_pairs &&
      most_tokens * kv.page_size < std::int64_t{1} << 32 && chooses_at_once(kv, first.summaries, group, scores))
    layers = layers_of(all);
  const std::int64_t rows = layers ? std::int64_t{kv.rows} * static_cast<std::int64_t>(all.size()) : 0,
                     rooms = 2 * static_cast<std::int64_t>(most_blocks());
  if (layers) {
    scores = scores_for(rooms, 1);
    a = args_of(first.queries.f32(), kv, first.summaries, first.choice, scores);
    write_to(a, {}, first.out, 0);
  }
  // Rows of the maps of all layers count in 31 bits.
  if (!layers || !fits_ring(a) ||
      layers->data / step_bytes_of(a) * static_cast<std::int64_t>(all.size()) >= std::int64_t{1} << 31) {
    for (const PutOffChoice& c : all) {
      scores.extent = c.scores.extent;
      PageList out = c.out;
      out.final = nullptr;
      run(c.queries.f32(), c.kv, c.summaries, c.choice, scores_for(c.kv.rows, kv.kv_heads), &out, s);
    }
    return;
  }
  make_softmax(a, rooms * group, s);
  a.arrived = static_cast<int*>(zeroed(s.handle(), "page scores arrived", max_pairs * sizeof(int)));
  a.layers = *layers;
  const std::int64_t most = std::min(rows, layer_rows_at_once(kv.kv_heads));
  for (std::int64_t begin = 0; begin < rows; begin += most) {
    a.layers.begin = static_cast<int>(begin);
    a.rows = static_cast<int>(std::min(most, rows - begin));
    launch_ring<true>(a, first.summaries.dtype == DType::f16, stream);
  }
}
KVLAB_ON_CUDA(chosen_in_layers, chosen_in_layers_cuda);

static void page_score_cuda(const Tensor<3>& queries, const PagedKv& kv, const Summaries& summaries, GroupRule rule,
                            float scale, Scores out, Stream s) {
  PageChoice choice;
  choice.rule = rule;
  choice.scale = scale;
  run(queries.f32(), kv, summaries, choice, out, nullptr, s);
}
KVLAB_ON_CUDA(page_score, page_score_cuda);

static void chosen_pages_cuda(const Tensor<3>& queries, const PagedKv& kv, const Summaries& summaries,
                              const PageChoice& choice, Scores scores, PageList out, Stream s) {
  run(queries.f32(), kv, summaries, choice, scores, &out, s);
}
KVLAB_ON_CUDA(chosen_pages, chosen_pages_cuda);

}  // namespace kvlab::ops
