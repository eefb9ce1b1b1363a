// Attention of decode steps over pages of plain bf16 or f16 rows.
//
// One block per multiprocessor. The 16-token units of all (row, KV head) pairs form one line that is cut into equal
// parts, one a block, so that ragged batches and long single sequences fill the machine alike. In a block every warp
// runs a pipeline of its own over each n-th unit: bulk copies (TMA, 128-byte swizzle) bring K and V of a unit, tensor
// cores compute with the query heads of the group as columns (attend_unit.cuh). Blocks that share a pair leave partial
// results; the last one to arrive merges them in the order of the line.
#include <cmath>
#include <map>
#include <mutex>
#include <tuple>

#include "base/launch.cuh"
#include "base/scratch.cuh"
#include "ops/attend.hpp"
#include "ops/attend_cuda.hpp"
#include "ops/attend_unit.cuh"

namespace kvlab::ops {
using namespace cuda;
namespace {

constexpr int max_pairs = 1024;  // (row, KV head) pairs of one launch

struct Args {
  const PageEntry* table;
  std::int64_t table_slot, table_head;
  const std::int32_t* length;
  std::int64_t length_slot, length_head;
  const std::int32_t* slots;
  const std::int32_t *list, *list_count;
  std::int64_t list_row, list_head, count_row, count_head;
  const float* queries;
  std::int64_t query_row, query_head;
  float *out, *lse, *mass;
  std::int64_t out_row, out_head, lse_row, mass_row, mass_head;
  const std::byte* base;
  const std::int32_t* last;
  float* partial;
  int* arrived;
  std::int64_t positions;  // offset in a frame
  int rows, kv_heads, group, page_size, window;
  int value_rows;  // 128-byte rows from a page's keys to its values
  int stages;
  bool joint;   // a page's keys and values are one piece of a unit's size
  float scale;  // of the scores, times log2(e)
};

__device__ __forceinline__ int tokens_of_pair(const Args& a, int pair) {
  const int row = pair / a.kv_heads, head = pair % a.kv_heads;
  const int length = a.length[a.slots[row] * a.length_slot + head * a.length_head];
  if (!a.list) return length;
  const int count = a.list_count[row * a.count_row + head * a.count_head];
  if (count == 0) return 0;
  const int newest = (length - 1) / a.page_size;
  const int last = a.list[row * a.list_row + head * a.list_head + count - 1];
  return count * a.page_size - (last == newest ? (newest + 1) * a.page_size - length : 0);
}

// What a lane knows of one unit to come: rows of the tensor map, place of its first token in the cache.
struct Unit {
  int y0, y1;  // second: of the next page where pages have 8 tokens, or -1
  int place0, place1;
};

template <int Dim>
__device__ __forceinline__ Unit locate(const Args& a, const int* first, int pairs, int x) {
  int lo = 0, hi = pairs;
  while (hi - lo > 1) {
    const int mid = (lo + hi) / 2;
    (first[mid] <= x ? lo : hi) = mid;
  }
  const int pair = lo, u = x - first[pair], row = pair / a.kv_heads, head = pair % a.kv_heads;
  const PageEntry* entries = a.table + a.slots[row] * a.table_slot + head * a.table_head;
  const std::int32_t* list = a.list ? a.list + row * a.list_row + head * a.list_head : nullptr;
  Unit out;
  if (a.page_size >= unit_tokens) {
    const int per_page = a.page_size / unit_tokens, i = u / per_page, sub = u % per_page;
    const int page = list ? list[i] : i;
    out.y0 = entries[page].frame + sub * (UnitShape<Dim>::side_bytes / 128);
    out.place0 = page * a.page_size + sub * unit_tokens;
    out.y1 = -1, out.place1 = 0;
  } else {
    const int count = (tokens_of_pair(a, pair) + a.page_size - 1) / a.page_size;
    const int p0 = list ? list[2 * u] : 2 * u;
    out.y0 = entries[p0].frame;
    out.place0 = p0 * a.page_size;
    out.y1 = -1, out.place1 = 0;
    if (2 * u + 1 < count) {
      const int p1 = list ? list[2 * u + 1] : 2 * u + 1;
      out.y1 = entries[p1].frame;
      out.place1 = p1 * a.page_size;
    }
  }
  return out;
}

// first[pair] = units before it, first[pairs] = all.
__device__ void count_units(const Args& a, int pairs, int* first, int* warp_sum) {
  const int threads = blockDim.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int each = (pairs + threads - 1) / threads, begin = threadIdx.x * each;
  constexpr int most = max_pairs / 128;  // of each: blocks have 128 or 256 threads
  int units[most], own = 0;
#pragma unroll
  for (int i = 0; i < most; ++i)  // all loads at once
    units[i] = i < each && begin + i < pairs ? (tokens_of_pair(a, begin + i) + unit_tokens - 1) / unit_tokens : 0;
#pragma unroll
  for (int i = 0; i < most; ++i)
    if (i < each && begin + i < pairs) {
      first[begin + i] = own;
      own += units[i];
    }
  int before = own;
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, before, d);
    if (lane >= d) before += other;
  }
  if (lane == 31) warp_sum[warp] = before;
  __syncthreads();
  int offset = before - own;
  for (int w = 0; w < warp; ++w) offset += warp_sum[w];
  for (int i = 0; i < each; ++i)
    if (begin + i < pairs) first[begin + i] += offset;
  if (threadIdx.x == threads - 1) first[pairs] = offset + own;
  __syncthreads();
}

template <class T, int Dim, int ColumnTiles>
__global__ void __launch_bounds__(256, 1)
    attend_kernel(const __grid_constant__ Args a, const __grid_constant__ CUtensorMap map) {
  using S = UnitShape<Dim>;
  constexpr int heads_room = 8 * ColumnTiles;
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int pairs = a.rows * a.kv_heads, group = a.group;

  extern __shared__ __align__(1024) unsigned char memory[];
  unsigned char* stages = memory;
  std::uint64_t* barriers = reinterpret_cast<std::uint64_t*>(stages + warps * a.stages * S::unit_bytes);
  float* merge = reinterpret_cast<float*>(barriers + warps * a.stages);  // [warp, head] max, sum; [warp, head, dim]
  int* first = reinterpret_cast<int*>(merge + warps * group * (2 + Dim));
  __shared__ int warp_sum[8];
  __shared__ float share[8 * ColumnTiles];  // [head] 1 / sum
  __shared__ bool merges;

  const unsigned my_stage = shared_address(stages) + warp * a.stages * S::unit_bytes;
  const unsigned my_barrier = shared_address(barriers + warp * a.stages);
  if (lane == 0) {
    for (int s = 0; s < a.stages; ++s) barrier_init(my_barrier + 8 * s, 1);
    barrier_init_fence();
  }
  __syncwarp();
  let_successor_start();
  wait_for_predecessor();
  count_units(a, pairs, first, warp_sum);

  for (int pair = blockIdx.x; pair < pairs; pair += gridDim.x)
    if (first[pair + 1] == first[pair])
      for (int i = threadIdx.x; i < group * Dim; i += blockDim.x) {
        const int row = pair / a.kv_heads, head = pair % a.kv_heads * group + i / Dim;
        a.out[row * a.out_row + head * a.out_head + i % Dim] = 0;
        if (a.lse && i % Dim == 0) a.lse[row * a.lse_row + head] = -INFINITY;
      }
  // Every block that works has at least one unit, so all from a pair's first to its last block arrive for it.
  const std::int64_t total = first[pairs], blocks = min(static_cast<std::int64_t>(gridDim.x), total);
  if (blockIdx.x >= blocks) return;
  const int lo = static_cast<int>(total * blockIdx.x / blocks),
            hi = static_cast<int>(total * (blockIdx.x + 1) / blocks);
  const int items = (hi - lo - warp + warps - 1) / warps;  // of this warp: lo + warp + i * warps
  const std::uint64_t policy = read_once_policy();

  Unit ahead = {};
  if (lane < items) ahead = locate<Dim>(a, first, pairs, lo + warp + lane * warps);
  Unit current = ahead;  // of the batch of 32 that is being worked on
  const auto issue = [&](int i, const Unit& batch) {
    const int y0 = __shfl_sync(~0u, batch.y0, i % 32), y1 = __shfl_sync(~0u, batch.y1, i % 32);
    if (lane) return;
    const int s = i % a.stages;
    const unsigned to = my_stage + s * S::unit_bytes, barrier = my_barrier + 8 * s;
    if (a.joint) {
      barrier_expect(barrier, S::unit_bytes);
      bulk_copy_2d(to, &map, 0, y0, barrier, policy);
    } else if (a.page_size >= unit_tokens) {
      barrier_expect(barrier, S::unit_bytes);
      bulk_copy_2d(to, &map, 0, y0, barrier, policy);
      bulk_copy_2d(to + S::side_bytes, &map, 0, y0 + a.value_rows, barrier, policy);
    } else {
      barrier_expect(barrier, y1 >= 0 ? S::unit_bytes : S::unit_bytes / 2);
      bulk_copy_2d(to, &map, 0, y0, barrier, policy);
      bulk_copy_2d(to + S::side_bytes, &map, 0, y0 + a.value_rows, barrier, policy);
      if (y1 >= 0) {
        bulk_copy_2d(to + S::side_bytes / 2, &map, 0, y1, barrier, policy);
        bulk_copy_2d(to + S::side_bytes * 3 / 2, &map, 0, y1 + a.value_rows, barrier, policy);
      }
    }
  };
  for (int i = 0; i < a.stages && i < items; ++i) issue(i, ahead);

  const int row0 = token_of<Dim>(g), row1 = row0 + 8;  // tokens of tile rows g and g + 8

  int pair = 0;
  {
    int top = pairs;
    while (top - pair > 1) {
      const int mid = (pair + top) / 2;
      (first[mid] <= lo ? pair : top) = mid;
    }
  }
  for (int i = 0; pair < pairs && first[pair] < hi; ++pair) {
    const int begin = first[pair], end = first[pair + 1];
    if (begin == end) continue;
    const int row = pair / a.kv_heads, kv_head = pair % a.kv_heads;
    const int tokens = tokens_of_pair(a, pair);
    const int stop = min(end, hi);

    // B fragments of Q^T: columns are the query heads of the group.
    unsigned qf[ColumnTiles][S::steps][2];
#pragma unroll
    for (int c = 0; c < ColumnTiles; ++c) {
      const int head = c * 8 + g;
      const float* from = a.queries + row * a.query_row + (kv_head * group + min(head, group - 1)) * a.query_head;
      const float factor = head < group ? 1.f : 0.f;
#pragma unroll
      for (int j = 0; j < S::steps / 2; ++j) pack_query<T>(from, factor, q, j, qf[c][2 * j], qf[c][2 * j + 1]);
    }
    float o[ColumnTiles][S::tiles][4], high[ColumnTiles][2], sum[ColumnTiles][2];
#pragma unroll
    for (int c = 0; c < ColumnTiles; ++c) {
#pragma unroll
      for (int t = 0; t < S::tiles; ++t) o[c][t][0] = o[c][t][1] = o[c][t][2] = o[c][t][3] = 0;
      high[c][0] = high[c][1] = -INFINITY;
      sum[c][0] = sum[c][1] = 0;
    }

    for (int x; i < items && (x = lo + warp + i * warps) < stop; ++i) {
      const int stage = i % a.stages;
      const unsigned keys = my_stage + stage * S::unit_bytes, values = keys + S::side_bytes;
      const int valid = min(unit_tokens, tokens - (x - begin) * unit_tokens);
      barrier_wait(my_barrier + 8 * stage, (i / a.stages) & 1);

      float s[ColumnTiles][4];
      score_unit<T, Dim>(keys, row0, row1, q, qf, s);
      bool seen0 = row0 < valid, seen1 = row1 < valid;
      if (a.window > 0 || a.mass) {
        const int place0 = __shfl_sync(~0u, current.place0, i % 32), place1 = __shfl_sync(~0u, current.place1, i % 32);
        const int upper = a.page_size >= unit_tokens ? place0 + row1 : place1 + row1 - 8;
        if (a.window > 0) {
          const int oldest = a.last[row] - a.window;  // not seen, and what is older neither
          const PageEntry* entries = a.table + a.slots[row] * a.table_slot + kv_head * a.table_head;
          const auto position = [&](int place) {
            const std::byte* frame = a.base + entries[place / a.page_size].frame * granule_bytes;
            return reinterpret_cast<const std::int32_t*>(frame + a.positions)[place % a.page_size];
          };
          if (seen0) seen0 = position(place0 + row0) > oldest;
          if (seen1) seen1 = position(upper) > oldest;
        }
        if (a.mass)
#pragma unroll
          for (int c = 0; c < ColumnTiles; ++c)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int head = c * 8 + 2 * q + h;
              if (head >= group) continue;
              float* to = a.mass + row * a.mass_row + (kv_head * group + head) * a.mass_head;
              if (seen0) to[place0 + row0] = s[c][h] * a.scale;
              if (seen1) to[upper] = s[c][2 + h] * a.scale;
            }
      }
      unsigned p[ColumnTiles][2];
#pragma unroll
      for (int c = 0; c < ColumnTiles; ++c) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          s[c][h] = seen0 ? s[c][h] * a.scale : -INFINITY;
          s[c][2 + h] = seen1 ? s[c][2 + h] * a.scale : -INFINITY;
        }
        soften_unit<T>(s[c], high[c], sum[c], o[c], p[c]);
      }
      add_unit<T, Dim>(values, valid, g, q, p, o);
      __syncwarp();
      const int next = i + a.stages;
      if (next % 32 == 0 && next < items + 32) {
        Unit fresh = {};
        if (next + lane < items) fresh = locate<Dim>(a, first, pairs, lo + warp + (next + lane) * warps);
        ahead = fresh;
      }
      if (next < items) issue(next, ahead);
      if ((i + 1) % 32 == 0) current = ahead;
    }

    // The block's warps into one.
    float* merge_high = merge;
    float* merge_sum = merge_high + warps * group;
    float* merge_out = merge_sum + warps * group;
#pragma unroll
    for (int c = 0; c < ColumnTiles; ++c)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        for (int d = 4; d < 32; d *= 2) sum[c][h] += __shfl_xor_sync(~0u, sum[c][h], d);
        const int head = c * 8 + 2 * q + h;
        if (head >= group) continue;
        if (g == 0) {
          merge_high[warp * group + head] = high[c][h];
          merge_sum[warp * group + head] = sum[c][h];
        }
        float* to = merge_out + (warp * group + head) * Dim;
#pragma unroll
        for (int t = 0; t < S::tiles; ++t)
          *reinterpret_cast<float2*>(to + element_of<Dim>(g, 2 * t)) = make_float2(o[c][t][h], o[c][t][2 + h]);
      }
    __syncthreads();
    const bool whole = begin >= lo && end <= hi;
    const int slot = blockIdx.x * 2 + (begin > lo ? 1 : 0);
    float* partial_out = a.partial + std::int64_t(slot) * heads_room * (Dim + 2);
    for (int x = threadIdx.x; x < group * Dim; x += blockDim.x) {
      const int head = x / Dim, d = x % Dim;
      float top = -INFINITY, total_sum = 0, value = 0;
      for (int w = 0; w < warps; ++w) top = fmaxf(top, merge_high[w * group + head]);
      if (top != -INFINITY)
        for (int w = 0; w < warps; ++w) {
          const float weight = exp2_fast(merge_high[w * group + head] - top);
          total_sum += weight * merge_sum[w * group + head];
          value += weight * merge_out[(w * group + head) * Dim + d];
        }
      if (whole) {
        const int query_head = kv_head * group + head;
        a.out[row * a.out_row + query_head * a.out_head + d] = total_sum > 0 ? value / total_sum : 0.f;
        if (a.lse && d == 0)
          a.lse[row * a.lse_row + query_head] = total_sum > 0 ? top * ln2 + logf(total_sum) : -INFINITY;
      } else {
        if (d == 0) partial_out[head * 2] = top, partial_out[head * 2 + 1] = total_sum;
        partial_out[2 * heads_room + head * Dim + d] = value;
      }
    }
    if (!whole) {
      // Blocks whose parts of the line touch this pair.
      const int from = static_cast<int>(((begin + 1) * blocks - 1) / total),
                to = static_cast<int>((end * blocks - 1) / total);
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) merges = atomicAdd(a.arrived + pair, 1) == to - from;
      __syncthreads();
      if (merges) {
        __threadfence();
        const int parts = to - from + 1,
                  from_slot = from * 2 + (begin > static_cast<int>(total * from / blocks) ? 1 : 0);
        const auto part = [&](int i) {
          return a.partial + std::int64_t(i == 0 ? from_slot : 2 * (from + i)) * heads_room * (Dim + 2);
        };
        float* weights = merge;  // [part, head]
        for (int head = warp; head < group; head += warps) {
          float top = -INFINITY, sum_of = 0;
          for (int i = lane; i < parts; i += 32) top = fmaxf(top, __ldcg(part(i) + head * 2));
          for (int d = 1; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
          for (int i = lane; i < parts; i += 32) {
            const float high_i = __ldcg(part(i) + head * 2),
                        weight = high_i == -INFINITY ? 0.f : exp2_fast(high_i - top);
            weights[i * group + head] = weight;
            sum_of += weight * __ldcg(part(i) + head * 2 + 1);
          }
          for (int d = 1; d < 32; d *= 2) sum_of += __shfl_xor_sync(~0u, sum_of, d);
          if (lane) continue;
          share[head] = sum_of > 0 ? 1 / sum_of : 0.f;
          if (a.lse)
            a.lse[row * a.lse_row + kv_head * group + head] = sum_of > 0 ? top * ln2 + logf(sum_of) : -INFINITY;
        }
        __syncthreads();
        for (int x = threadIdx.x; x < group * Dim; x += blockDim.x) {
          const int head = x / Dim, d = x % Dim;
          float value = 0;
#pragma unroll 8
          for (int i = 0; i < parts; ++i) value += weights[i * group + head] * __ldcg(part(i) + 2 * heads_room + x);
          a.out[row * a.out_row + (kv_head * group + head) * a.out_head + d] = value * share[head];
        }
        if (threadIdx.x == 0) a.arrived[pair] = 0;
      }
    }
    __syncthreads();
  }
}

// mass holds scores times log2(e), -inf where nothing was attended.
__global__ void mass_kernel(float* mass, std::int64_t mass_row, std::int64_t mass_head, int tokens, const float* lse,
                            std::int64_t lse_row) {
  const int head = blockIdx.y, row = blockIdx.z;
  const float shift = lse[row * lse_row + head] * log2e;
  float* x = mass + row * mass_row + head * mass_head;
  for (int t = blockIdx.x * blockDim.x + threadIdx.x; t < tokens; t += gridDim.x * blockDim.x)
    x[t] = x[t] == -INFINITY ? 0.f : exp2_fast(x[t] - shift);
}

__global__ void fill_kernel(float* out, std::int64_t row, std::int64_t head, int tokens, float value) {
  float* x = out + blockIdx.z * row + blockIdx.y * head;
  for (int t = blockIdx.x * blockDim.x + threadIdx.x; t < tokens; t += gridDim.x * blockDim.x) x[t] = value;
}

template <class T, int Dim, int ColumnTiles>
void launch(Args a, const CUtensorMap& map, cudaStream_t stream) {
  using S = UnitShape<Dim>;
  const int warps = Dim > 128 ? 4 : 8, pairs = a.rows * a.kv_heads;
  const std::int64_t fixed = std::int64_t{warps} * a.group * (2 + Dim) * 4 + (pairs + 1) * 4;
  const std::int64_t limit = cuda::shared_bytes() - 1024;  // static shared memory, aligned
  a.stages = static_cast<int>(std::min<std::int64_t>(16, (limit - fixed) / (warps * (S::unit_bytes + 8))));
  if (a.stages < 2)
    throw Error(Errc::unsupported,
                "got a group of " + std::to_string(a.group) + " query heads of " + std::to_string(Dim) +
                    ", wanted one that fits shared memory",
                "op attend");
  const int bytes = static_cast<int>(warps * a.stages * (S::unit_bytes + 8) + fixed);
  const auto kernel = attend_kernel<T, Dim, ColumnTiles>;
  static const cudaError_t once = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                       static_cast<int>(cuda::shared_bytes() - 1024));
  cuda::check(once, "attend");
  cuda::launch("attend", kernel, cuda::multiprocessors(), warps * 32, bytes, stream, true, a, map);
}

template <class T>
void launch_dim(const Args& a, int dim, const CUtensorMap& map, cudaStream_t stream) {
  const bool wide = a.group > 8;
  switch (dim) {
    case 64: return wide ? launch<T, 64, 2>(a, map, stream) : launch<T, 64, 1>(a, map, stream);
    case 96: return wide ? launch<T, 96, 2>(a, map, stream) : launch<T, 96, 1>(a, map, stream);
    case 128: return wide ? launch<T, 128, 2>(a, map, stream) : launch<T, 128, 1>(a, map, stream);
    default: return wide ? launch<T, 256, 2>(a, map, stream) : launch<T, 256, 1>(a, map, stream);
  }
}

}  // namespace

// Nothing past what the cache names is ever asked for.
const CUtensorMap& unit_map(const void* base, int box_rows, bool half) {
  static std::mutex mutex;
  static std::map<std::tuple<const void*, int, bool>, CUtensorMap> maps;
  const std::lock_guard lock(mutex);
  const auto key = std::make_tuple(base, box_rows, half);
  if (const auto found = maps.find(key); found != maps.end()) return found->second;
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  cuda::check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found),
              "cuTensorMapEncodeTiled");
  if (!entry)
    throw Error(Errc::device, "got a driver without cuTensorMapEncodeTiled, wanted CUDA 12 or newer", "op attend");
  CUtensorMap map;
  const cuuint64_t extent[] = {64, 0x7fffffff}, stride[] = {128};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_rows)}, step[] = {1, 1};
  const CUresult status = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry)(
      &map, half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(base),
      extent, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    throw Error(Errc::device, "got error " + std::to_string(status) + " for a map of 128-byte rows", "op attend");
  return maps.emplace(key, map).first->second;
}

bool attend_pipelined(const AttendArgs& in) {
  const PagedKv& kv = in.kv;
  const int dim = kv.head_dim, p = kv.page_size, group = static_cast<int>(in.queries.extent[1]) / kv.kv_heads;
  const CodecSpec codec = kv.layouts[0].codec;
  const DType dtype = kv.layouts[0].dtype;
  return codec.k.bits == 0 && codec.v.bits == 0 && (dtype == DType::bf16 || dtype == DType::f16) &&
         (dim == 64 || dim == 96 || dim == 128 || dim == 256) &&
         (p == 16 || p == 32 || p == 64 || (p == 8 && dim != 96)) && group <= 16 &&
         kv.rope != RopeRegime::cache_relative && kv.kv_heads <= max_pairs;
}

void attend_cuda(const AttendArgs& in, void* handle) {
  if (!attend_pipelined(in)) return attend_any_cuda(in, handle);
  const PagedKv& kv = in.kv;
  const cudaStream_t stream = cuda::stream_of(handle);
  const PageLayout& l = kv.layouts[0];
  const int dim = kv.head_dim, heads = static_cast<int>(in.queries.extent[1]);
  const int row_bytes = dim * 2;
  const bool half = l.dtype == DType::f16;
  Args a = {};
  a.table = kv.table.data;
  a.table_slot = kv.table.stride[0], a.table_head = kv.table.stride[1];
  a.length = kv.length.data;
  a.length_slot = kv.length.stride[0], a.length_head = kv.length.stride[1];
  a.query_row = in.queries.stride[0], a.query_head = in.queries.stride[1];
  a.out_row = in.out.stride[0], a.out_head = in.out.stride[1];
  a.base = kv.base;
  a.positions = l.positions;
  a.kv_heads = kv.kv_heads;
  a.group = heads / kv.kv_heads;
  a.page_size = kv.page_size;
  a.window = in.window;
  a.value_rows = static_cast<int>((l.v - l.k) / 128);
  a.scale = (in.softmax_scale != 0 ? in.softmax_scale : 1.f / std::sqrt(static_cast<float>(dim))) * log2e;
  const std::size_t partials = std::size_t(cuda::multiprocessors()) * 2 * 16 * (256 + 2) * sizeof(float);
  a.partial = static_cast<float*>(cuda::kept(handle, "attend partial", partials));
  a.arrived = static_cast<int*>(cuda::zeroed(handle, "attend arrived", max_pairs * sizeof(int)));
  View<float, 2> lse = in.lse;
  if (in.mass && !lse)
    lse = View<float, 2>::dense(
        static_cast<float*>(cuda::fixed_scratch(handle, "attend lse", std::size_t(kv.rows) * heads * 4)),
        {kv.rows, heads});
  const int tokens = static_cast<int>(in.mass ? in.mass.extent[2] : 0);
  const dim3 mass_grid(std::max(1, std::min(64, tokens / 1024)), heads, std::max(1, kv.rows));
  if (in.mass && kv.rows > 0)
    fill_kernel<<<mass_grid, 256, 0, stream>>>(in.mass.data, in.mass.stride[0], in.mass.stride[1], tokens, -INFINITY);
  a.joint =
      kv.page_size == unit_tokens && l.v - l.k == unit_tokens * row_bytes && 2 * unit_tokens * row_bytes / 128 <= 256;
  const CUtensorMap& map =
      unit_map(kv.base, std::min(kv.page_size, unit_tokens) * row_bytes / 128 * (a.joint ? 2 : 1), half);
  const int at_once = max_pairs / kv.kv_heads;
  for (int begin = 0; begin < kv.rows; begin += at_once) {
    a.rows = std::min(at_once, kv.rows - begin);
    a.slots = kv.slots + begin;
    a.queries = in.queries.data + begin * a.query_row;
    a.out = in.out.data + begin * a.out_row;
    a.last = in.last ? in.last + begin : nullptr;
    if (lse) a.lse = lse.data + begin * lse.stride[0], a.lse_row = lse.stride[0];
    if (in.mass)
      a.mass = in.mass.data + begin * in.mass.stride[0], a.mass_row = in.mass.stride[0],
      a.mass_head = in.mass.stride[1];
    if (in.pages) {
      const PageList& list = *in.pages;
      a.list = list.index.data + begin * list.index.stride[0];
      a.list_row = list.index.stride[0], a.list_head = list.index.stride[1];
      a.list_count = list.count.data + begin * list.count.stride[0];
      a.count_row = list.count.stride[0], a.count_head = list.count.stride[1];
    }
    half ? launch_dim<__half>(a, dim, map, stream) : launch_dim<__nv_bfloat16>(a, dim, map, stream);
  }
  if (in.mass && kv.rows > 0) {
    mass_kernel<<<mass_grid, 256, 0, stream>>>(in.mass.data, in.mass.stride[0], in.mass.stride[1], tokens, lse.data,
                                               lse.stride[0]);
    cuda::check_launch("attend mass");
  }
}

}  // namespace kvlab::ops
