// One block finds the entries of a head that make up a share of its sum.
#pragma once
#include "base/lanes.cuh"
#include "ops/select/select.cuh"

namespace kvlab::ops::device {

constexpr int share_threads = 512;  // of the block

// Each thread gets the sum over the block. parts: [share_threads / 32] shared memory.
__device__ inline double block_sum(double x, double* parts) {
  x = cuda::sum_of_lanes(x);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (int w = 0; w < share_threads / 32; ++w) x += parts[w];
  __syncthreads();
  return x;
}

// The same for three sums at once. parts: [3 * share_threads / 32].
__device__ inline void block_sums(double (&x)[3], double* parts) {
#pragma unroll
  for (double& sum : x) sum = cuda::sum_of_lanes(sum);
  if (threadIdx.x % 32 == 0)
#pragma unroll
    for (int i = 0; i < 3; ++i) parts[3 * (threadIdx.x / 32) + i] = x[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    x[i] = 0;
    for (int w = 0; w < share_threads / 32; ++w) x[i] += parts[3 * w + i];
  }
  __syncthreads();
}

constexpr int share_parts = 3 * share_threads / 32;

// The fewest entries that make up a share: all whose bits are above `least`, and `taken` of the `equal` ones. The
// default has all above 0.
struct Share {
  unsigned least = 0;
  double above = 0, equal = 0, taken = 0;  // numbers of entries
};

// Whether x is one of these. All threads of the block call it, in rounds of neighbouring entries: the first of equal
// ones are taken. equal: how many were seen, 0 before the first round. scan: [share_threads / 32] shared memory.
__device__ __forceinline__ bool takes(const Share& share, float x, unsigned& equal, unsigned* scan) {
  const unsigned key = x > 0 ? __float_as_uint(x) : 0;
  if (!(share.taken > 0)) return key > share.least;
  const bool same = key == share.least;
  unsigned total = 0;
  const unsigned before = share.taken < share.equal ? equal + block_scan(same, scan, total) : 0;
  equal += total;
  return key > share.least || (same && before < share.taken);
}

// each(f) calls f(x) for each entry of the thread. Those that are not above 0 count for nothing. parts: [share_parts].
// The bits of numbers above 0 rank as the numbers do. So the threshold that just enough entries reach is found two bits
// at a time, the highest first. Entries at the threshold are equal, so a division says how many of them it takes.
template <class Each>
__device__ Share share_of(const Each& each, double share, double* parts) {
  double all = 0;
  each([&](float x) {
    if (x > 0) all += x;
  });
  const double wanted = share * block_sum(all, parts);
  Share found;
  if (!(wanted > 0)) return found;
  for (int bit = 30; bit >= 0; bit -= 2) {  // the sign is 0, so the first pair has one bit that counts
    const unsigned step = 1u << bit;
    double sums[3] = {};
    each([&](float x) {
      if (!(x > 0)) return;
      const unsigned key = __float_as_uint(x);
#pragma unroll
      for (unsigned i = 0; i < 3; ++i)
        if (key >= found.least + (i + 1) * step) sums[i] += x;
    });
    block_sums(sums, parts);
    found.least += (sums[2] >= wanted ? 3 : sums[1] >= wanted ? 2 : sums[0] >= wanted ? 1 : 0) * step;
  }
  int more = 0, same = 0;
  double sum = 0;
  each([&](float x) {
    if (!(x > 0)) return;
    const unsigned key = __float_as_uint(x);
    same += key == found.least;
    more += key > found.least;
    if (key > found.least) sum += x;
  });
  sum = block_sum(sum, parts);
  const double counts = block_sum(same + more * 0x1p32, parts);  // two whole numbers, exact
  found.above = floor(counts * 0x1p-32), found.equal = counts - found.above * 0x1p32;
  if (found.least >= 0x7f800000u) {
    found.taken = 1;
    return found;
  }
  const double value = __uint_as_float(found.least);
  found.taken = fmin(found.equal, fmax(1., ceil((wanted - sum) / value)));
  if (found.taken < found.equal && sum + found.taken * value < wanted) found.taken += 1;  // the quotient was rounded
  return found;
}

}  // namespace kvlab::ops::device
