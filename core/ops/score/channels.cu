#include <kvlab/rewrite.hpp>

#include <algorithm>

#include "base/device_op.hpp"
#include "base/lanes.cuh"
#include "base/scratch.cuh"
#include "ops/score/channels.hpp"
#include "ops/score/heads.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;

constexpr int threads = 256, part_rows = 1024;  // rows that one block sums
static_assert(threads >= 256, "a thread for each element of a row");

// Threads of a block that sum one row together: dim neighbours. Others begin at later rows, or have none.
struct Sums {
  double part[threads];

  // The sum over rows [0, count) of x(row)^2, for the first dim threads. The whole block calls it.
  template <class Row>
  __device__ double squares(int dim, std::int64_t count, const Row& x) {
    const int at_once = threads / dim, d = threadIdx.x % dim, first = threadIdx.x / dim;
    double sum = 0;
    for (std::int64_t i = first; first < at_once && i < count; i += at_once) {
      const double y = x(i)[d];
      sum += y * y;
    }
    __syncthreads();
    part[threadIdx.x] = sum;
    __syncthreads();
    for (int i = 1; threadIdx.x < dim && i < at_once; ++i) sum += part[i * dim + d];
    return sum;
  }
};

// Grid [part, kv_head, row].
__global__ void __launch_bounds__(threads)
    row_squares_kernel(const __grid_constant__ DeviceKv kv, View<const float, 4> rows, double* parts) {
  __shared__ Sums sums;
  const int head = blockIdx.y, row = blockIdx.z, dim = kv.head_dim;
  const int n = entries_of(kv, row, head, 1, rows.extent[2]), first = blockIdx.x * part_rows;
  const double sum =
      sums.squares(dim, min(part_rows, n - first), [&](std::int64_t i) { return &rows(row, head, first + i, 0); });
  if (threadIdx.x < dim)
    parts[((std::int64_t(row) * gridDim.y + head) * gridDim.x + blockIdx.x) * dim + threadIdx.x] = sum;
}

// Grid [kv_head, row].
__global__ void __launch_bounds__(threads)
    energy_kernel(const __grid_constant__ DeviceKv kv, View<const float, 4> queries, const double* parts, int count,
                  View<float, 3> out) {
  __shared__ Sums sums;
  const int head = blockIdx.x, row = blockIdx.y, dim = kv.head_dim, d = threadIdx.x, n = kv.tokens(row, head);
  const std::int64_t window = queries.extent[2], group = queries.extent[1] / kv.kv_heads;
  const double of_queries = sums.squares(
      dim, group * window, [&](std::int64_t i) { return &queries(row, head * group + i / window, i % window, 0); });
  if (d >= dim) return;
  double of_rows = 0;
  for (int part = 0; part < count; ++part)
    of_rows += parts[((std::int64_t(row) * gridDim.x + head) * count + part) * dim + d];
  out(row, head, d) = static_cast<float>(of_queries / static_cast<double>(max(group * window, std::int64_t{1})) *
                                         (of_rows / static_cast<double>(max(n, 1))));
}

// Grid [part, kv_head, row].
__global__ void __launch_bounds__(threads) zero_kernel(const __grid_constant__ DeviceKv kv, View<const float, 3> energy,
                                                       int count, int newest, View<float, 4> rows) {
  __shared__ float of[threads];
  const int head = blockIdx.y, row = blockIdx.z, dim = kv.head_dim, d = threadIdx.x;
  const int end = min(entries_of(kv, row, head, 1, rows.extent[2]), kv.tokens(row, head) - newest);
  if (d < dim) of[d] = energy(row, head, d);
  __syncthreads();
  int before = 0;
  for (int e = 0; d < dim && e < dim; ++e) before += goes_first(of[e], e, of[d], d);
  if (d >= dim || before >= count) return;
  for (int t = blockIdx.x; t < end; t += gridDim.x) rows(row, head, t, d) = 0;
}

void channel_energy_cuda(const Tensor<4>& queries, const PagedKv& kv, View<const float, 4> rows, View<float, 3> out,
                         Stream s) {
  if (kv.rows == 0) return;
  const auto count = static_cast<unsigned>(std::max<std::int64_t>(1, (rows.extent[2] + part_rows - 1) / part_rows)),
             heads = static_cast<unsigned>(kv.kv_heads), of_rows = static_cast<unsigned>(kv.rows);
  auto* parts = static_cast<double*>(
      fixed_scratch(s.handle(), "channel energy", std::size_t{of_rows} * heads * count * kv.head_dim * sizeof(double)));
  row_squares_kernel<<<dim3(count, heads, of_rows), threads, 0, stream_of(s)>>>(DeviceKv(kv), rows, parts);
  check_launch("channel_energy");
  energy_kernel<<<dim3(heads, of_rows), threads, 0, stream_of(s)>>>(DeviceKv(kv), queries.f32(), parts,
                                                                    static_cast<int>(count), out);
  check_launch("channel_energy");
}

void zero_channels_cuda(const PagedKv& kv, View<const float, 3> energy, int count, int newest, View<float, 4> rows,
                        Stream s) {
  if (kv.rows == 0 || count == 0) return;
  const auto parts = static_cast<unsigned>(std::clamp<std::int64_t>(rows.extent[2] / 32, 1, 256));
  zero_kernel<<<dim3(parts, static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.rows)), threads, 0,
                stream_of(s)>>>(DeviceKv(kv), energy, count, newest, rows);
  check_launch("zero_channels");
}

}  // namespace

KVLAB_ON_CUDA(channel_energy, channel_energy_cuda);
KVLAB_ON_CUDA(zero_channels, zero_channels_cuda);

}  // namespace kvlab::ops
