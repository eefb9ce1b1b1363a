// One block serves a query head: weights, threshold and marks of its candidates. The last block of a KV head turns the
// marks of its group into a list.
#include <algorithm>
#include <bit>

#include "base/device_op.hpp"
#include "base/scratch.cuh"
#include "ops/page/paged.cuh"
#include "ops/select/marks.cuh"
#include "ops/select/share.cuh"
#include "ops/select/top_p.hpp"

namespace kvlab::ops {
namespace {

using namespace cuda;
using namespace device;

constexpr int threads = share_threads, most_near = 2048;

struct Args {
  DeviceKv kv;
  View<const float, 3> logits;
  IndexList entries;
  TokenList list;
  float temperature;
  double p;
  int newest, group;
  int most, words;            // candidates of a head, and words of their marks
  bool held;                  // weights of a row have room in shared memory
  int unit, shift;            // places of an entry; 2^shift is their number, -1 = none is
  unsigned *marks, *arrived;  // [row, kv_head, word], a bit for each candidate that is taken; [row, kv_head]. All zero

  __device__ int entry(int i) const { return shift >= 0 ? i >> shift : i / unit; }
};

// The threshold of a share of weights that are at most 1, and the numbers of weights above it, at it and taken at it.
// As share_of, but once few weights are near the threshold, only these are looked at. near: [most_near] shared memory.
template <class Each>
__device__ Share share_of_weights(const Each& each, double share, float* near, double* parts, unsigned* scan) {
  double all = 0;
  each([&](float x) { all += x; });
  const double wanted = share * block_sum(all, parts);
  Share found;
  if (!(wanted > 0)) return found;
  double above = 0;  // the sum of what is too large for `near`
  const auto refine = [&](const auto& those, int bit) {
    const unsigned step = 1u << bit;
    double sums[3] = {};
    those([&](float x) {
      const unsigned key = __float_as_uint(x);
#pragma unroll
      for (unsigned i = 0; i < 3; ++i)
        if (key >= found.least + (i + 1) * step) sums[i] += x;
    });
    block_sums(sums, parts);
    found.least += (above + sums[2] >= wanted   ? 3
                    : above + sums[1] >= wanted ? 2
                    : above + sums[0] >= wanted ? 1
                                                : 0) *
                   step;
  };
  const auto finish = [&](const auto& those) {
    int more = 0, same = 0;
    double sum = 0;
    those([&](float x) {
      const unsigned key = __float_as_uint(x);
      same += key == found.least;
      more += key > found.least;
      if (key > found.least) sum += x;
    });
    sum = above + block_sum(sum, parts);
    const double counts = block_sum(same + more * 0x1p32, parts);  // two whole numbers, exact
    found.above = floor(counts * 0x1p-32), found.equal = counts - found.above * 0x1p32;
    const double value = __uint_as_float(found.least);
    found.taken = fmin(found.equal, fmax(1., ceil((wanted - sum) / value)));
    if (found.taken < found.equal && sum + found.taken * value < wanted) found.taken += 1;  // the quotient was rounded
  };
  // No weight is above 1, whose bits are below 2^30.
  constexpr int near_bit = 20;
  for (int bit = 28; bit >= near_bit; bit -= 2) refine(each, bit);
  const unsigned end = found.least + (1u << near_bit);
  unsigned own = 0, total = 0;
  double sum = 0;
  each([&](float x) {
    const unsigned key = __float_as_uint(x);
    own += key >= found.least && key < end;
    if (key >= end) sum += x;
  });
  unsigned at = block_scan(own, scan, total);
  if (total > most_near) {
    for (int bit = near_bit - 2; bit >= 0; bit -= 2) refine(each, bit);
    finish(each);
    return found;
  }
  above = block_sum(sum, parts);
  each([&](float x) {
    const unsigned key = __float_as_uint(x);
    if (key >= found.least && key < end) near[at++] = x;
  });
  __syncthreads();
  const auto nearby = [&](auto f) {
    for (unsigned i = threadIdx.x; i < total; i += threads) f(near[i]);
  };
  for (int bit = near_bit - 2; bit >= 0; bit -= 2) refine(nearby, bit);
  finish(nearby);
  return found;
}

// Shared memory: a row's weights where they have room, later words of marks and how many tokens come before each.
__global__ void __launch_bounds__(threads) top_p_candidates_kernel(const __grid_constant__ Args a) {
  extern __shared__ uint4 dynamic[];
  __shared__ float near[most_near], greatest[threads / 32];
  __shared__ double parts[share_parts];
  __shared__ unsigned scan[threads / 32], arrivals;
  const int q = blockIdx.x, head = q / a.group, row = blockIdx.y, tid = static_cast<int>(threadIdx.x);
  const std::int64_t from_list = a.entries.at(row);
  const int of_list =
      static_cast<int>(min(static_cast<std::int64_t>(a.entries.count(from_list, head)), a.entries.index.extent[2]));
  const int count = min(of_list * a.unit, a.most);
  const float* logits = a.logits.data + row * a.logits.stride[0] + q * a.logits.stride[1];
  auto* weights = reinterpret_cast<float*>(dynamic);

  float most = -INFINITY;
#pragma unroll 8
  for (int i = tid; i < count; i += threads) {
    const float x = logits[i];
    if (a.held) weights[i] = x;
    most = fmaxf(most, x);
  }
  most = most_of_lanes(most);
  if (tid % 32 == 0) greatest[tid / 32] = most;
  __syncthreads();
  for (const float x : greatest) most = fmaxf(most, x);
  const auto weight = [&](float x) { return x == most ? 1.f : x > -INFINITY ? expf((x - most) / a.temperature) : 0.f; };
  const bool any = most > -INFINITY;
  if (a.held && any)
#pragma unroll 4
    for (int i = tid; i < count; i += threads) weights[i] = weight(weights[i]);
  const auto weight_at = [&](int i) { return a.held ? weights[i] : weight(logits[i]); };
  __syncthreads();

  Share share;  // of p = 1: everything above 0
  if (any && a.p < 1) {
    const auto each = [&](auto f) {
#pragma unroll 4
      for (int i = tid; i < count; i += threads) f(weight_at(i));
    };
    share = share_of_weights(each, a.p, near, parts, scan);
  }
  const std::int64_t pair = static_cast<std::int64_t>(row) * a.kv.kv_heads + head;
  unsigned* marks = a.marks + pair * a.words;
  unsigned equal = 0;
  for (int first = 0; any && first < count; first += threads) {
    const int i = first + tid;
    const unsigned bits = __ballot_sync(all_lanes, takes(share, i < count ? weight_at(i) : 0.f, equal, scan));
    if (tid % 32 == 0 && bits != 0) atomicOr(marks + (i >> 5), bits);
  }
  __threadfence();
  __syncthreads();
  if (tid == 0) arrivals = atomicAdd(a.arrived + pair, 1u);
  __syncthreads();
  if (arrivals + 1 != static_cast<unsigned>(a.group)) return;
  __threadfence();

  // Candidates before the newest places, then these places.
  const int n = a.kv.tokens(row, head), cut = n - min(n, a.newest), cut_entry = a.entry(cut);
  int entries = of_list;
  while (entries > 0 && a.entries.index(from_list, head, entries - 1) >= cut_entry) --entries;
  int before_cut = entries * a.unit;
  if (entries < of_list && a.entries.index(from_list, head, entries) == cut_entry)
    before_cut += cut - cut_entry * a.unit;
  auto* taken = reinterpret_cast<unsigned*>(dynamic);
  unsigned *first_of = taken + a.words, kept = 0;
  for (int from = 0; from < a.words; from += threads) {
    const int w = from + tid;
    unsigned bits = w < a.words ? __ldcg(marks + w) : 0, total = 0;
    if (bits != 0) marks[w] = 0;
    bits &= lowest_bits(before_cut - 32 * w);
    const unsigned at = kept + block_scan(__popc(bits), scan, total);
    if (w < a.words) taken[w] = bits, first_of[w] = at;
    kept += total;
  }
  __syncthreads();
  const std::int64_t at = a.list.at(row);
  std::int32_t* to = a.list.index.data + at * a.list.index.stride[0] + head * a.list.index.stride[1];
  const std::int64_t step = a.list.index.stride[2], room = a.list.index.extent[2];
  const int lane = tid % 32;
#pragma unroll 4
  for (int w = tid / 32; w < a.words; w += threads / 32) {
    const unsigned bits = taken[w];
    const std::int64_t place = first_of[w] + __popc(bits & ((1u << lane) - 1));
    if (!(bits >> lane & 1) || place >= room) continue;
    const int i = 32 * w + lane, entry = a.entry(i);
    to[place * step] = a.entries.index(from_list, head, entry) * a.unit + (i - entry * a.unit);
  }
  for (int i = tid; cut + i < n; i += threads)
    if (kept + i < room) to[(kept + i) * step] = cut + i;
  if (tid == 0) {
    a.list.count(at, head) = static_cast<int>(min(static_cast<std::int64_t>(kept) + (n - cut), room));
    a.arrived[pair] = 0;
  }
}

void top_p_entries_cuda(const PagedKv& kv, View<const float, 3> logits, const IndexList& entries, int unit,
                        float temperature, float p, int newest, TokenList list, Stream s) {
  if (kv.rows == 0) return;
  const std::int64_t most = std::min(entries.index.extent[2] * unit, logits.extent[2]);
  const std::int64_t words = (most + 31) / 32, pairs = std::int64_t{kv.rows} * kv.kv_heads;
  const std::int64_t room = shared_bytes() - 16 * 1024;
  if (words * 8 > room)
    throw Error(Errc::unsupported,
                "got up to " + std::to_string(most) + " candidates, wanted at most " + std::to_string(room * 4),
                "op top_p_candidates");
  const auto places = static_cast<unsigned>(unit);
  auto* marks = static_cast<unsigned*>(
      zeroed_scratch(s.handle(), "candidates taken", static_cast<std::size_t>(pairs * words + 1) * 4));
  auto* arrived =
      static_cast<unsigned*>(zeroed_scratch(s.handle(), "candidates arrived", static_cast<std::size_t>(pairs) * 4));
  const bool held = most * 4 <= room;
  const Args a{DeviceKv(kv),
               logits,
               entries,
               list,
               temperature,
               double{p},
               newest,
               static_cast<int>(logits.extent[1]) / kv.kv_heads,
               static_cast<int>(most),
               static_cast<int>(words),
               held,
               unit,
               std::has_single_bit(places) ? std::countr_zero(places) : -1,
               marks,
               arrived};
  check(cudaFuncSetAttribute(top_p_candidates_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(room)),
        "top_p_candidates");
  const dim3 grid(static_cast<unsigned>(logits.extent[1]), static_cast<unsigned>(kv.rows));
  top_p_candidates_kernel<<<grid, threads, static_cast<std::size_t>(std::max(held ? most * 4 : 0, words * 8)),
                            stream_of(s)>>>(a);
  check_launch("top_p_candidates");
}

}  // namespace

KVLAB_ON_CUDA(top_p_entries, top_p_entries_cuda);

}  // namespace kvlab::ops
