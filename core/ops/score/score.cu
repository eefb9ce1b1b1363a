// Per-token scores from the cache, token state, pooling and group reduction. A head's blocks stride over its tokens.
#include <kvlab/ops.hpp>

#include <algorithm>

#include "ops/page/add_mass.cuh"
#include "ops/score/heads.cuh"
#include "ops/score/reduce_pages.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;

constexpr int threads = score_threads;

__device__ __forceinline__ float square_sum(const float* x, int bytes, int lane) {
  float sum = 0;
  for (int i = lane; i < bytes / 16; i += 8) {
    const float4 v = reinterpret_cast<const float4*>(x)[i];
    sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  }
  return sum;
}
template <class T>
__device__ __forceinline__ float square_sum(const T* x, int bytes, int lane) {
  float sum = 0;
  for (int i = lane; i < bytes / 16; i += 8) {
    const uint4 v = reinterpret_cast<const uint4*>(x)[i];
    const unsigned words[] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (const unsigned w : words) {
      float low, high;
      Pair<T>::unpack(w, low, high);
      sum += low * low + high * high;
    }
  }
  return sum;
}

// Eight lanes read a token.
__global__ void __launch_bounds__(threads)
    row_norm_kernel(DeviceKv kv, bool keys, View<float, 3> out, const __grid_constant__ Heads heads) {
  const int head = blockIdx.y, row = blockIdx.z, n = entries_of(kv, row, head, 1, out.extent[2]);
  if (!heads.on(kv.kv.slots[row], head)) return;
  const int lane = threadIdx.x % 8;
  for (int begin = blockIdx.x * (threads / 8); begin < n; begin += gridDim.x * (threads / 8)) {
    const int t = begin + threadIdx.x / 8;
    float sum = 0;
    if (t < n) {
      const auto token = kv.token(row, head, t);
      const PageLayout& l = *token.layout;
      const std::byte* side = token.frame + (keys ? l.k : l.v);
      const std::int64_t at = std::int64_t(token.offset) * l.head_dim;
      if (keys ? l.codec.k.bits : l.codec.v.bits) {
        for (int d = lane; d < l.head_dim; d += 8) {
          const float x = token.element(keys, d);
          sum += x * x;
        }
      } else if (l.dtype == DType::f32) {
        sum = square_sum(reinterpret_cast<const float*>(side) + at, l.head_dim * 4, lane);
      } else if (l.dtype == DType::f16) {
        sum = square_sum(reinterpret_cast<const __half*>(side) + at, l.head_dim * 2, lane);
      } else {
        sum = square_sum(reinterpret_cast<const __nv_bfloat16*>(side) + at, l.head_dim * 2, lane);
      }
    }
    sum = sum_of_lanes<1, 4>(sum);
    if (t < n && lane == 0) out(row, head, t) = sqrtf(sum);
  }
}

__global__ void __launch_bounds__(threads) scale_kernel(View<float, 3> out, float factor) {
  for (std::int64_t t = blockIdx.x * threads + threadIdx.x; t < out.extent[2]; t += std::int64_t(gridDim.x) * threads)
    out(blockIdx.z, blockIdx.y, t) *= factor;
}

__global__ void __launch_bounds__(threads) recency_kernel(DeviceKv kv, View<float, 3> out) {
  const int head = blockIdx.y, row = blockIdx.z, n = entries_of(kv, row, head, 1, out.extent[2]);
  for (int t = blockIdx.x * threads + threadIdx.x; t < n; t += gridDim.x * threads)
    out(row, head, t) = static_cast<float>(kv.position(row, head, t));
}

__global__ void __launch_bounds__(threads)
    query_counts_kernel(DeviceKv kv, const std::int32_t* seen, int window, View<float, 3> out) {
  const int head = blockIdx.y, row = blockIdx.z, n = entries_of(kv, row, head, 1, out.extent[2]);
  for (int t = blockIdx.x * threads + threadIdx.x; t < n; t += gridDim.x * threads)
    out(row, head, t) = static_cast<float>(max(0, min(window, seen[row] - kv.position(row, head, t))));
}

__global__ void __launch_bounds__(threads)
    read_state_kernel(DeviceKv kv, int column, View<float, 3> out, const __grid_constant__ Heads heads) {
  const int head = blockIdx.y, row = blockIdx.z, n = entries_of(kv, row, head, 1, out.extent[2]);
  if (!heads.on(kv.kv.slots[row], head)) return;
  for (int t = blockIdx.x * threads + threadIdx.x; t < n; t += gridDim.x * threads)
    out(row, head, t) = *kv.token(row, head, t).state(column);
}

// Every input is 1 where `in` is null.
__global__ void __launch_bounds__(threads)
    blend_state_kernel(DeviceKv kv, int column, float keep, View<const float, 3> in, float factor, std::int64_t room,
                       const __grid_constant__ Heads heads) {
  const int head = blockIdx.y, row = blockIdx.z, n = entries_of(kv, row, head, 1, room);
  if (!heads.on(kv.kv.slots[row], head)) return;
  for (int t = blockIdx.x * threads + threadIdx.x; t < n; t += gridDim.x * threads) {
    if (float* state = kv.state(row, head, t, column))
      *state = (keep != 0 ? keep * *state : 0.f) + factor * (in.data ? in(row, head, t) : 1.f);
  }
}

// One thread sums a page.
__global__ void __launch_bounds__(threads)
    page_sum_kernel(DeviceKv kv, View<const float, 3> in, int group, View<float, 3> out) {
  const int head = blockIdx.y, row = blockIdx.z, n = entries_of(kv, row, head / group, 1, in.extent[2]);
  const int pages = entries_of(kv, row, head / group, kv.page_size, out.extent[2]);
  for (int p = blockIdx.x * threads + threadIdx.x; p < pages; p += gridDim.x * threads) {
    float sum = 0;
    for (int t = p * kv.page_size; t < min(n, (p + 1) * kv.page_size); ++t) sum += in(row, head, t);
    out(row, head, p) = sum;
  }
}

// Heads are those of the scores: query heads, or KV heads with group = 1.
__global__ void __launch_bounds__(threads)
    pool_kernel(DeviceKv kv, const float* copy, std::int64_t room, int group, bool maximum, int kernel, int excluded,
                View<float, 3> out, const __grid_constant__ Heads heads) {
  const int head = blockIdx.y, row = blockIdx.z, half = kernel / 2;
  if (!heads.on(kv.kv.slots[row], head / group)) return;
  const int n = entries_of(kv, row, head / group, 1, room) - excluded;
  const float* in = copy + (std::int64_t(row) * gridDim.y + head) * room;
  for (int t = blockIdx.x * threads + threadIdx.x; t < n; t += gridDim.x * threads) {
    float x = maximum ? -INFINITY : 0.f;
    for (int i = max(0, t - half); i <= min(n - 1, t + half); ++i) x = maximum ? fmaxf(x, in[i]) : x + in[i];
    out(row, head, t) = maximum ? x : x / static_cast<float>(kernel);
  }
}

__global__ void __launch_bounds__(threads) copy_kernel(DeviceKv kv, View<const float, 3> in, int group, float* copy,
                                                       std::int64_t room, const __grid_constant__ Heads heads) {
  const int head = blockIdx.y, row = blockIdx.z, n = entries_of(kv, row, head / group, 1, room);
  if (!heads.on(kv.kv.slots[row], head / group)) return;
  float* to = copy + (std::int64_t(row) * gridDim.y + head) * room;
  for (int t = blockIdx.x * threads + threadIdx.x; t < n; t += gridDim.x * threads) to[t] = in(row, head, t);
}

// stats[row, head] = maximum and sum of a query head's softmax. The sum is 0 where the maximum is not finite.
__global__ void __launch_bounds__(threads)
    softmax_kernel(DeviceKv kv, View<const float, 3> in, int group, int unit, float scale, float2* stats,
                   const __grid_constant__ Heads heads) {
  __shared__ float parts[threads / 32];
  if (!heads.on(kv.kv.slots[blockIdx.z], blockIdx.y / group)) return;
  const int head = blockIdx.y, row = blockIdx.z, n = entries_of(kv, row, head / group, unit, in.extent[2]);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float high = -INFINITY, sum = 0;
  for (int t = threadIdx.x; t < n; t += threads) high = fmaxf(high, in(row, head, t) * scale);
  high = most_of_lanes(high);
  if (lane == 0) parts[warp] = high;
  __syncthreads();
  for (int w = 0; w < threads / 32; ++w) high = fmaxf(high, parts[w]);
  __syncthreads();
  if (fabsf(high) < INFINITY)
    for (int t = threadIdx.x; t < n; t += threads) sum += expf(in(row, head, t) * scale - high);
  sum = sum_of_lanes(sum);
  if (lane == 0) parts[warp] = sum;
  __syncthreads();
  sum = 0;
  for (int w = 0; w < threads / 32; ++w) sum += parts[w];
  if (threadIdx.x == 0) stats[std::int64_t(row) * gridDim.y + head] = make_float2(high, sum);
}

struct Reduce {
  DeviceKv kv;
  View<const float, 3> in;
  View<float, 3> out;  // null = the kernel adds to the state column
  const float2* stats;
  std::int64_t room;
  int group, parts, unit, column;  // parts: heads of `out` for each KV head
  float scale;
  GroupRule rule;
  Heads heads;
};

__global__ void __launch_bounds__(threads) reduce_kernel(const __grid_constant__ Reduce a) {
  const int head = blockIdx.y, row = blockIdx.z, kv_head = head / a.parts;
  const int n = entries_of(a.kv, row, kv_head, a.unit, a.room);
  if (!a.heads.on(a.kv.kv.slots[row], kv_head)) return;
  for (int t = blockIdx.x * threads + threadIdx.x; t < n; t += gridDim.x * threads) {
    float x = 0;
    for (int g = 0; g < a.group; ++g) {
      const float y = a.in(row, head * a.group + g, t);
      if (a.rule == GroupRule::softmax_mean) {
        const float2 s = a.stats[(std::int64_t(row) * gridDim.y + head) * a.group + g];
        if (s.y > 0) x += expf(y * a.scale - s.x) / (s.y * static_cast<float>(a.group));
      } else if (g == 0) {
        x = y;
      } else {
        x = a.rule != GroupRule::max ? x + y : x < y ? y : x;
      }
    }
    if (a.rule == GroupRule::mean) x *= 1.f / static_cast<float>(a.group);
    if (a.out.data)
      a.out(row, head, t) = x;
    else if (float* state = a.kv.state(row, head, t, a.column))
      *state += x;
  }
}

void reduce(const PagedKv& kv, const View<const float, 3>& in, GroupRule rule, float scale, int unit, int column,
            const Scores& out, const char* op, Stream s, const Heads& which = {}) {
  if (kv.rows == 0) return;
  const cudaStream_t stream = stream_of(s);
  const int heads = static_cast<int>(in.extent[1]);
  const int out_heads = out && unit == 1 ? static_cast<int>(out.extent[1]) : kv.kv_heads;
  Reduce a = {};
  a.kv = DeviceKv(kv);
  a.in = in, a.out = out;
  a.room = out ? std::min(in.extent[2], out.extent[2]) : in.extent[2];
  a.group = heads / out_heads, a.parts = out_heads / kv.kv_heads, a.unit = unit, a.column = column, a.scale = scale,
  a.rule = rule;
  a.heads = which;
  if (rule == GroupRule::softmax_mean) {
    auto* stats =
        static_cast<float2*>(fixed_scratch(s.handle(), "group softmax", std::size_t(kv.rows) * heads * sizeof(float2)));
    softmax_kernel<<<dim3(1, heads, kv.rows), threads, 0, stream>>>(a.kv, in, heads / kv.kv_heads, unit, scale, stats,
                                                                    which);
    check_launch(op);
    a.stats = stats;
  }
  reduce_kernel<<<grid_of(out_heads, kv.rows, capacity(kv) / unit + 1), threads, 0, stream>>>(a);
  check_launch(op);
}

}  // namespace

static void row_norm_cuda(const KvRows& rows, Scores out, Stream s, const Heads& heads) {
  const PagedKv& kv = *rows.kv;
  if (kv.rows == 0) return;
  row_norm_kernel<<<grid_of(kv.kv_heads, kv.rows, capacity(kv), threads / 8), threads, 0, stream_of(s)>>>(
      DeviceKv(kv), rows.side == KvSide::key, out, heads);
  check_launch("row_norm");
}
KVLAB_ON_CUDA(row_norm, row_norm_cuda);

static void scale_cuda(Scores out, float factor, Stream s) {
  if (out.extent[0] <= 0 || out.extent[1] <= 0 || out.extent[2] <= 0) return;
  scale_kernel<<<grid_of(out.extent[1], out.extent[0], out.extent[2]), threads, 0, stream_of(s)>>>(out, factor);
  check_launch("scale");
}
KVLAB_ON_CUDA(scale, scale_cuda);

static void recency_cuda(const PagedKv& kv, Scores out, Stream s) {
  if (kv.rows == 0) return;
  recency_kernel<<<grid_of(kv.kv_heads, kv.rows, capacity(kv)), threads, 0, stream_of(s)>>>(DeviceKv(kv), out);
  check_launch("recency");
}
KVLAB_ON_CUDA(recency, recency_cuda);

static void query_counts_cuda(const PagedKv& kv, const std::int32_t* seen, int window, Scores out, Stream s) {
  if (kv.rows == 0) return;
  query_counts_kernel<<<grid_of(kv.kv_heads, kv.rows, capacity(kv)), threads, 0, stream_of(s)>>>(DeviceKv(kv), seen,
                                                                                                 window, out);
  check_launch("query_counts");
}
KVLAB_ON_CUDA(query_counts, query_counts_cuda);

static void pool_cuda(const PagedKv& kv, Scores scores, Pooling kind, int kernel, int excluded, Workspace&, Stream s,
                      const Heads& which) {
  if (kv.rows == 0) return;
  const std::int64_t heads = scores.extent[1], room = std::min(capacity(kv), scores.extent[2]);
  const int group = static_cast<int>(heads) / kv.kv_heads;
  auto* copy =
      static_cast<float*>(fixed_scratch(s.handle(), "pool", std::size_t(kv.rows) * heads * room * sizeof(float)));
  const dim3 grid = grid_of(heads, kv.rows, room);
  copy_kernel<<<grid, threads, 0, stream_of(s)>>>(DeviceKv(kv), scores, group, copy, room, which);
  check_launch("pool");
  pool_kernel<<<grid, threads, 0, stream_of(s)>>>(DeviceKv(kv), copy, room, group, kind == Pooling::max, kernel,
                                                  excluded, scores, which);
  check_launch("pool");
}
KVLAB_ON_CUDA(pool, pool_cuda);

static void group_reduce_cuda(const PagedKv& kv, View<const float, 3> in, GroupRule rule, Scores out, Stream s,
                              const Heads& heads) {
  reduce(kv, in, rule, 1.f, 1, 0, out, "group_reduce", s, heads);
}
KVLAB_ON_CUDA(group_reduce, group_reduce_cuda);

void add_mass_cuda(View<const float, 3> mass, GroupRule rule, const StateColumn& column, Stream s, const Heads& heads) {
  reduce(*column.kv, mass, rule, 1.f, 1, column.column, {}, "add_mass", s, heads);
}
KVLAB_ON_CUDA(add_mass, add_mass_cuda);

static void read_state_cuda(const StateColumn& column, Scores out, Stream s, const Heads& heads) {
  const PagedKv& kv = *column.kv;
  if (kv.rows == 0) return;
  read_state_kernel<<<grid_of(kv.kv_heads, kv.rows, capacity(kv)), threads, 0, stream_of(s)>>>(
      DeviceKv(kv), column.column, out, heads);
  check_launch("read_state");
}
KVLAB_ON_CUDA(read_state, read_state_cuda);

static void blend_state_cuda(const StateColumn& column, float keep, View<const float, 3> in, float factor, Stream s,
                             const Heads& heads) {
  const PagedKv& kv = *column.kv;
  if (kv.rows == 0) return;
  const std::int64_t room = in ? std::min(capacity(kv), in.extent[2]) : capacity(kv);
  blend_state_kernel<<<grid_of(kv.kv_heads, kv.rows, room), threads, 0, stream_of(s)>>>(DeviceKv(kv), column.column,
                                                                                        keep, in, factor, room, heads);
  check_launch("blend_state");
}
KVLAB_ON_CUDA(blend_state, blend_state_cuda);

static void page_sum_cuda(const PagedKv& kv, View<const float, 3> in, Scores out, Stream s) {
  if (kv.rows == 0) return;
  page_sum_kernel<<<grid_of(in.extent[1], kv.rows, kv.table.extent[2]), threads, 0, stream_of(s)>>>(
      DeviceKv(kv), in, static_cast<int>(in.extent[1]) / kv.kv_heads, out);
  check_launch("page_sum");
}
KVLAB_ON_CUDA(page_sum, page_sum_cuda);

void reduce_pages_cuda(const PagedKv& kv, const View<const float, 3>& in, GroupRule rule, float scale,
                       const Scores& out, Stream s) {
  reduce(kv, in, rule, scale, kv.page_size, 0, out, "page_score", s);
}

}  // namespace kvlab::ops
