// One block serves a KV head. A thread sums the pages that are its own in the CPU's order, so both give the same bits.
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
  int row = 0;
  IndexList list;
  int each = 0;  // tokens of a list's entry; 0 = there is no list
  View<const float, 2> mass;
  int window = 0, page = 0;
  View<double, 3> sums;
  View<std::int32_t, 2> read;
  View<std::int32_t, 1> nonfinite;
  unsigned char* seen = nullptr;  // [kv_head, text position]
};

__global__ void __launch_bounds__(threads) unread_mass_kernel(const __grid_constant__ Args a) {
  __shared__ int nonfinite;
  const int head = blockIdx.x, n = a.kv.tokens(a.row, head), group = static_cast<int>(a.mass.extent[0]) / gridDim.x;
  const auto total = static_cast<int>(a.mass.extent[1]);
  unsigned char* seen = a.seen + std::int64_t{head} * total;
  if (threadIdx.x == 0) nonfinite = 0;
  for (int t = threadIdx.x; t < total; t += threads) seen[t] = 0;
  __syncthreads();
  const auto see = [&](int t) {
    if (t >= n) return;
    const std::int32_t at = a.kv.position(a.row, head, t);
    if (at >= 0 && at < total && (a.window == 0 || at > total - 1 - a.window)) seen[at] = 1;
  };
  if (a.each == 0) {
    for (int t = threadIdx.x; t < n; t += threads) see(t);
  } else {
    const std::int64_t row = a.list.at(a.row);
    const int count = a.list.count(row, head) * a.each;
    for (int i = threadIdx.x; i < count; i += threads)
      see(a.list.index(row, head, i / a.each) * a.each + i % a.each);
  }
  __syncthreads();
  int bad = 0;
  for (int p = threadIdx.x; p < a.read.extent[1]; p += threads) {
    const int begin = p * a.page, end = min(total, begin + a.page);
    double sum = 0, left = 0;
    int any = 0;
    for (int t = begin; t < end; ++t) any |= seen[t];
    for (int g = 0; g < group; ++g) {
      double all = 0, unread = 0;
      for (int t = begin; t < end; ++t) {
        const float x = a.mass(head * group + g, t);
        bad += !(fabsf(x) < INFINITY);
        all += x;
        unread += seen[t] ? 0.f : x;
      }
      sum += all;
      left += unread;
    }
    a.sums(head, p, 0) = sum;
    a.sums(head, p, 1) = left;
    a.read(head, p) = any;
  }
  if (bad) atomicAdd(&nonfinite, bad);
  __syncthreads();
  if (threadIdx.x == 0) a.nonfinite(head) = nonfinite;
}

void unread_mass_cuda(const UnreadMass& u, Workspace& scratch, Stream s) {
  Args a;
  a.kv = DeviceKv(u.kv);
  if (const IndexList* list = u.pages ? static_cast<const IndexList*>(u.pages) : u.tokens) a.list = *list;
  a.each = u.pages ? u.kv.page_size : u.tokens ? 1 : 0;
  a.row = u.row;
  a.mass = u.mass;
  a.window = u.window;
  a.page = u.page;
  a.sums = u.sums;
  a.read = u.read;
  a.nonfinite = u.nonfinite;
  const auto heads = static_cast<unsigned>(u.kv.kv_heads);
  a.seen = static_cast<unsigned char*>(
      scratch.scratch("positions that attention read", heads * static_cast<std::size_t>(u.mass.extent[1])));
  unread_mass_kernel<<<heads, threads, 0, stream_of(s)>>>(a);
  check_launch("unread_mass");
}

}  // namespace

KVLAB_ON_CUDA(unread_mass, unread_mass_cuda);

}  // namespace kvlab::ops
