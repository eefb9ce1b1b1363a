// Chunks of keys on a GPU. Sums of landmarks and cosines are in f64 and run in the order of the CPU's. There products
// of two f32 are exact, so both devices find the same bits.
#include "ops/select/chunks.hpp"

#include <algorithm>

#include "base/cuda.cuh"
#include "base/device_op.hpp"
#include "base/lanes.cuh"
#include "ops/page/paged.cuh"
#include "ops/select/marks.cuh"

namespace kvlab::ops {
using namespace cuda;
using namespace device;
namespace {

constexpr int threads = 256, warps = threads / 32, landmark_threads = 64, most_dim = 256;

// Grids are [.., head, row].
dim3 grid_of_heads(std::int64_t blocks, std::int64_t heads, int rows) {
  return dim3(static_cast<unsigned>(std::max<std::int64_t>(blocks, 1)), static_cast<unsigned>(heads),
              static_cast<unsigned>(rows));
}

__device__ int count_of(const DeviceKv& kv, const KeyChunks& chunks, int row, int head, int local) {
  return static_cast<int>(chunks_of(kv.tokens(row, head), chunks.size, local, chunks.cosine.extent[2]));
}

// A block takes a chunk.
__global__ void __launch_bounds__(landmark_threads)
    landmark_kernel(const __grid_constant__ DeviceKv kv, int local, const __grid_constant__ KeyChunks chunks) {
  __shared__ float landmark[most_dim], least[landmark_threads];
  const int c = blockIdx.x, head = blockIdx.y, row = blockIdx.z, slot = kv.kv.slots[row], me = threadIdx.x;
  if (c >= count_of(kv, chunks, row, head, local)) return;
  const int dim = kv.head_dim, first = c * chunks.size;
  for (int d = me; d < dim; d += landmark_threads) {
    double sum = 0;
    for (int t = first; t < first + chunks.size; ++t) sum += double(kv.token(row, head, t).key(d));
    chunks.landmark(slot, head, c, d) = landmark[d] = static_cast<float>(sum / chunks.size);
  }
  __syncthreads();
  least[me] = INFINITY;
  for (int t = me; t < chunks.size; t += landmark_threads) {
    const DeviceKv::Token token = kv.token(row, head, first + t);
    double ab = 0, aa = 0, bb = 0;
    for (int d = 0; d < dim; ++d) {
      const double x = token.key(d), y = landmark[d];
      ab += y * x, aa += y * y, bb += x * x;
    }
    const float cosine = cosine_of(ab, aa, bb);
    if (cosine < least[me]) least[me] = cosine;
  }
  __syncthreads();
  if (me != 0) return;
  float all = least[0];
  for (int i = 1; i < landmark_threads; ++i)
    if (least[i] < all) all = least[i];
  chunks.cosine(slot, head, c) = all;
}

__global__ void __launch_bounds__(threads) outlier_kernel(const __grid_constant__ DeviceKv kv, int local, int outliers,
                                                          const __grid_constant__ KeyChunks chunks) {
  const int c = blockIdx.x * threads + threadIdx.x, head = blockIdx.y, row = blockIdx.z, slot = kv.kv.slots[row];
  const int count = count_of(kv, chunks, row, head, local);
  if (c == 0) chunks.count(slot, head) = count;
  if (c >= count) return;
  const float own = -chunks.cosine(slot, head, c);
  int before = 0;
  for (int b = 0; b < count; ++b) before += b != c && comes_before(-chunks.cosine(slot, head, b), b, own, c);
  chunks.outlier(slot, head, c) = before < outliers;
}

void chunk_keys_cuda(const PagedKv& kv, int local, int outliers, const KeyChunks& chunks, Stream s) {
  if (kv.rows == 0) return;
  const std::int64_t most = std::min(chunks.cosine.extent[2], kv.table.extent[2] * kv.page_size / chunks.size);
  landmark_kernel<<<grid_of_heads(most, kv.kv_heads, kv.rows), landmark_threads, 0, stream_of(s)>>>(DeviceKv(kv), local,
                                                                                                    chunks);
  check_launch("chunk_keys");
  outlier_kernel<<<grid_of_heads((most + threads - 1) / threads, kv.kv_heads, kv.rows), threads, 0, stream_of(s)>>>(
      DeviceKv(kv), local, outliers, chunks);
  check_launch("chunk_keys");
}

struct Scoring {
  DeviceKv kv;
  KeyChunks chunks;
  View<const float, 3> queries;
  double scale;
  View<double, 3> share;  // [row, query head, chunk]: logits, then shares
  View<float, 3> out;
  int group;
  bool greatest;

  __device__ int slot(int row) const { return kv.kv.slots[row]; }
};

// A warp takes a chunk, all queries of its KV head.
__global__ void __launch_bounds__(threads) chunk_logits_kernel(const __grid_constant__ Scoring a) {
  const int c = blockIdx.x * warps + threadIdx.x / 32, head = blockIdx.y, row = blockIdx.z, lane = threadIdx.x % 32;
  const int slot = a.slot(row);
  if (c >= a.chunks.count(slot, head) || a.chunks.outlier(slot, head, c)) return;
  const float* landmark = &a.chunks.landmark(slot, head, c, 0);
  for (int g = head * a.group; g < (head + 1) * a.group; ++g) {
    const float* query = &a.queries(row, g, 0);
    double dot = 0;
    for (int d = lane; d < a.kv.head_dim; d += 32) dot += double(query[d]) * double(landmark[d]);
    dot = sum_of_lanes(dot);
    if (lane == 0) a.share(row, g, c) = a.scale * dot;
  }
}

// A block takes the softmax of a query head.
__global__ void __launch_bounds__(threads) chunk_softmax_kernel(const __grid_constant__ Scoring a) {
  __shared__ double parts[warps];
  const int q = blockIdx.y, row = blockIdx.z, head = q / a.group, slot = a.slot(row);
  const int count = a.chunks.count(slot, head), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  double most = -INFINITY, sum = 0;
  for (int c = threadIdx.x; c < count; c += threads)
    if (!a.chunks.outlier(slot, head, c)) most = fmax(most, a.share(row, q, c));
  most = most_of_lanes(most);
  if (lane == 0) parts[warp] = most;
  __syncthreads();
  for (int w = 0; w < warps; ++w) most = fmax(most, parts[w]);
  __syncthreads();
  for (int c = threadIdx.x; c < count; c += threads) {
    double& x = a.share(row, q, c);
    x = a.chunks.outlier(slot, head, c) ? 0 : exp(x - most);
    sum += x;
  }
  sum = sum_of_lanes(sum);
  if (lane == 0) parts[warp] = sum;
  __syncthreads();
  sum = 0;
  for (int w = 0; w < warps; ++w) sum += parts[w];
  for (int c = threadIdx.x; c < count; c += threads)
    if (!a.chunks.outlier(slot, head, c)) a.share(row, q, c) /= sum;
}

__global__ void __launch_bounds__(threads) chunk_join_kernel(const __grid_constant__ Scoring a) {
  const int c = blockIdx.x * threads + threadIdx.x, head = blockIdx.y, row = blockIdx.z;
  if (c >= a.chunks.count(a.slot(row), head)) return;
  double joined = 0;
  for (int g = head * a.group; g < (head + 1) * a.group; ++g) {
    const double x = a.share(row, g, c);
    joined = a.greatest ? (x != x || x > joined ? x : joined) : joined + x / a.group;
  }
  a.out(row, head, c) = static_cast<float>(joined);
}

void chunk_scores_cuda(const PagedKv& kv, View<const float, 3> queries, float scale, GroupRule rule,
                       const KeyChunks& chunks, Scores out, Workspace& w, Stream s) {
  const std::int64_t room = chunks.cosine.extent[2], heads = queries.extent[1];
  if (kv.rows == 0 || room == 0) return;
  Scoring a;
  a.kv = DeviceKv(kv);
  a.chunks = chunks;
  a.queries = queries;
  a.scale = double{scale};
  a.share = take_scratch<double>(w, "shares of chunks", {std::int64_t{kv.rows}, heads, room});
  a.out = out;
  a.group = static_cast<int>(heads) / kv.kv_heads;
  a.greatest = rule == GroupRule::max;
  chunk_logits_kernel<<<grid_of_heads((room + warps - 1) / warps, kv.kv_heads, kv.rows), threads, 0, stream_of(s)>>>(a);
  check_launch("chunk_scores");
  chunk_softmax_kernel<<<grid_of_heads(1, heads, kv.rows), threads, 0, stream_of(s)>>>(a);
  check_launch("chunk_scores");
  chunk_join_kernel<<<grid_of_heads((room + threads - 1) / threads, kv.kv_heads, kv.rows), threads, 0, stream_of(s)>>>(
      a);
  check_launch("chunk_scores");
}

// A block takes a head.
__global__ void __launch_bounds__(threads)
    chunk_tokens_kernel(const __grid_constant__ DeviceKv kv, View<const float, 3> scores,
                        View<const std::int32_t, 2> most, const __grid_constant__ KeyChunks chunks,
                        const __grid_constant__ TokenList list) {
  __shared__ SelectShared select;
  __shared__ unsigned marks[places_at_once / 32];
  const int head = blockIdx.y, row = blockIdx.z, slot = kv.kv.slots[row], count = chunks.count(slot, head);
  const int n = min(static_cast<std::int64_t>(kv.tokens(row, head)), list.index.extent[2]);
  const auto key = [&](int, int c, unsigned i, unsigned long long& k) {
    if (chunks.outlier(slot, head, c)) return false;
    k = selection_key(scores(row, head, c), i);
    return true;
  };
  unsigned long long threshold = ~0ull;  // no key reaches it
  if (scores.data) {
    unsigned own = 0, candidates;
    for (int c = threadIdx.x; c < count; c += threads) own += chunks.outlier(slot, head, c) == 0;
    block_scan(own, select.scan, candidates);
    const int wanted = most(row, head), bounds[] = {0, count};
    if (wanted >= static_cast<int>(candidates))
      threshold = 0;
    else if (wanted > 0)
      threshold = radix_threshold(key, bounds, 1, static_cast<unsigned>(wanted), 0, select);
  }
  const auto each = [&](const auto& mark) {
    for (int c = threadIdx.x; c < count; c += threads) {
      unsigned long long k = 0;
      if (scores.data ? key(0, c, static_cast<unsigned>(c), k) && k < threshold : chunks.outlier(slot, head, c) == 0)
        continue;
      for (int t = c * chunks.size; t < (c + 1) * chunks.size; ++t) mark(t);
    }
  };
  const int kept = list_places(n, 0, count * chunks.size, &list.index(list.at(row), head, 0), marks, select.scan, each);
  if (threadIdx.x == 0) list.count(list.at(row), head) = kept;
}

void chunk_tokens_cuda(const PagedKv& kv, View<const float, 3> scores, View<const std::int32_t, 2> most,
                       const KeyChunks& chunks, TokenList list, Stream s) {
  if (kv.rows == 0) return;
  chunk_tokens_kernel<<<grid_of_heads(1, kv.kv_heads, kv.rows), threads, 0, stream_of(s)>>>(DeviceKv(kv), scores, most,
                                                                                            chunks, list);
  check_launch("chunk_tokens");
}

}  // namespace

KVLAB_ON_CUDA(chunk_keys, chunk_keys_cuda);
KVLAB_ON_CUDA(chunk_scores, chunk_scores_cuda);
KVLAB_ON_CUDA(chunk_tokens, chunk_tokens_cuda);

}  // namespace kvlab::ops
