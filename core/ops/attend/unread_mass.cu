// A block serves a KV head of a row. A thread sums the pages that are its own in the CPU's order, so both give the same
// bits.
#include "ops/attend/unread_mass.hpp"

#include "base/cuda.cuh"
#include "base/device_op.hpp"
#include "ops/page/paged.cuh"

namespace kvlab::ops {
using namespace cuda;
namespace {

constexpr int threads = 512;

struct Args {
  DeviceKv kv;
  IndexList list;
  int each = 0;  // tokens of a list's entry; 0 = there is no list
  View<const float, 3> mass;
  const std::int32_t* last = nullptr;
  int window = 0, page = 0;
  View<double, 4> sums;
  View<std::int32_t, 3> read;
  View<std::int32_t, 2> nonfinite;
  unsigned char* seen = nullptr;  // [row, kv_head, text position]
};

__global__ void __launch_bounds__(threads) unread_mass_kernel(const __grid_constant__ Args a) {
  __shared__ int nonfinite;
  const int head = blockIdx.x, row = blockIdx.y, n = a.kv.tokens(row, head);
  const int group = static_cast<int>(a.mass.extent[1]) / gridDim.x, newest = a.last[row], total = newest + 1;
  unsigned char* seen = a.seen + (std::int64_t{row} * gridDim.x + head) * a.mass.extent[2];
  if (threadIdx.x == 0) nonfinite = 0;
  for (int t = threadIdx.x; t < total; t += threads) seen[t] = 0;
  __syncthreads();
  const auto see = [&](int t) {
    if (t >= n) return;
    const std::int32_t at = a.kv.position(row, head, t);
    if (at >= 0 && at <= newest && (a.window == 0 || at > newest - a.window)) seen[at] = 1;
  };
  if (a.each == 0) {
    for (int t = threadIdx.x; t < n; t += threads) see(t);
  } else {
    const std::int64_t at = a.list.at(row);
    const int count = a.list.count(at, head) * a.each;
    for (int i = threadIdx.x; i < count; i += threads) see(a.list.index(at, head, i / a.each) * a.each + i % a.each);
  }
  __syncthreads();
  int bad = 0;
  for (int p = threadIdx.x; p < a.read.extent[2]; p += threads) {
    const int begin = p * a.page, end = min(total, begin + a.page);
    double sum = 0, left = 0;
    int any = 0;
    for (int t = begin; t < end; ++t) any |= seen[t];
    for (int g = 0; g < group; ++g) {
      double all = 0, unread = 0;
      for (int t = begin; t < end; ++t) {
        const float x = a.mass(row, head * group + g, t);
        bad += !(fabsf(x) < INFINITY);
        all += x;
        unread += seen[t] ? 0.f : x;
      }
      sum += all;
      left += unread;
    }
    a.sums(row, head, p, 0) = sum;
    a.sums(row, head, p, 1) = left;
    a.read(row, head, p) = any;
  }
  if (bad) atomicAdd(&nonfinite, bad);
  __syncthreads();
  if (threadIdx.x == 0) a.nonfinite(row, head) = nonfinite;
}

void unread_mass_cuda(const UnreadMass& u, Workspace& scratch, Stream s) {
  if (u.kv.rows == 0) return;
  Args a;
  a.kv = DeviceKv(u.kv);
  if (const IndexList* list = u.pages ? static_cast<const IndexList*>(u.pages) : u.tokens) a.list = *list;
  a.each = u.pages ? u.kv.page_size : u.tokens ? 1 : 0;
  a.mass = u.mass;
  a.last = u.last;
  a.window = u.window;
  a.page = u.page;
  a.sums = u.sums;
  a.read = u.read;
  a.nonfinite = u.nonfinite;
  const dim3 grid(static_cast<unsigned>(u.kv.kv_heads), static_cast<unsigned>(u.kv.rows));
  a.seen = static_cast<unsigned char*>(scratch.scratch(
      "positions that attention read", std::size_t{grid.x} * grid.y * static_cast<std::size_t>(u.mass.extent[2])));
  unread_mass_kernel<<<grid, threads, 0, stream_of(s)>>>(a);
  check_launch("unread_mass");
}

}  // namespace

KVLAB_ON_CUDA(unread_mass, unread_mass_cuda);

}  // namespace kvlab::ops
