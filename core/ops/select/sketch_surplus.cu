// Tokens that leave join the sketch of their head. A block takes a head, and one token after the other.
#include <kvlab/error.hpp>

#include <cstring>

#include "base/device_op.hpp"
#include "ops/page/paged.cuh"
#include "ops/select/sketch.hpp"
#include "ops/select/surplus.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;

constexpr int threads = 256, most_dim = 256;

struct Args {
  DeviceKv kv;
  Surplus of;
  SketchRule rule;
  const std::uint64_t* keys;  // [row], or null
  KvSketch to;
};

struct Token {
  float key[most_dim], value[most_dim];
};

// Bits of numbers that are not negative rank as the numbers do.
__device__ __forceinline__ unsigned long long bits_of(double x) {
  unsigned long long bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
__device__ __forceinline__ double of_bits(unsigned long long bits) {
  double x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// All threads of the block take part.
__device__ void join(const Args& a, int row, int head, int t, std::uint64_t start, Token& token,
                     device::SelectShared& shared) {
  const int dim = a.kv.head_dim, slot = a.kv.kv.slots[row], me = threadIdx.x;
  const DeviceKv::Token from = a.kv.token(row, head, t);
  for (int d = me; d < dim; d += threads) token.key[d] = from.key(d), token.value[d] = from.value(d);
  const std::uint64_t draws = split_mix(start, from.position());
  std::int32_t *count = &a.to.count(slot, head, 0), *size = count + 1;
  double* squares = &a.to.squares(slot, head, 0);
  __syncthreads();
  const int made = count[0];
  double least = INFINITY;
  int nearest = a.rule.clusters;
  for (int c = me; c < made; c += threads) {
    const float* centre = &a.to.centre(slot, head, c, 0);
    double sum = 0;
    for (int d = 0; d < dim; ++d) {
      const double x = double(token.key[d]) - double(centre[d]);
      sum += x * x;
    }
    if (sum < least) least = sum, nearest = c;
  }
  const unsigned long long own = bits_of(least);
  const unsigned long long best = device::block_min(own, shared.candidate);
  int cluster = static_cast<int>(
      device::block_min(static_cast<unsigned long long>(own == best ? nearest : a.rule.clusters), shared.candidate));
  if (cluster == a.rule.clusters) cluster = 0;  // no distance is a finite number
  const bool opens = opens_cluster(a.rule, made, of_bits(best));
  if (opens) cluster = made;
  const int n = opens ? 1 : size[cluster] + 1;
  double square = 0;
  for (int d = 0; d < dim; ++d) square += double(token.value[d]) * double(token.value[d]);
  const double mu = squares[0] + square;
  __syncthreads();  // all have read what changes now
  if (me == 0) count[0] = made + opens, size[cluster] = n, squares[0] = mu;
  for (int d = me; opens && d < dim; d += threads) a.to.centre(slot, head, cluster, d) = token.key[d];
  for (int i = me; i < a.rule.samples + a.rule.values; i += threads) {
    const std::uint64_t draw = sketch_draw(draws, i);
    const int value = i - a.rule.samples;
    if (value < 0 ? !replaces_key(draw, n) : !replaces_value(draw, square, mu)) continue;
    const int place = value < 0 ? cluster * a.rule.samples + i : a.rule.clusters * a.rule.samples + value;
    for (int d = 0; d < dim; ++d) a.to.tokens.keys(slot, head, place, d) = token.key[d];
    for (int d = 0; value >= 0 && d < dim; ++d)
      a.to.tokens.values(slot, head, place, d) = token.value[d] * numerator_factor;
    if (value >= 0) squares[1 + value] = square;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(threads) sketch_kernel(const __grid_constant__ Args a) {
  extern __shared__ unsigned chosen[];  // bits of the tokens that leave
  __shared__ device::SelectShared shared;
  __shared__ Token token;
  const int head = blockIdx.x, row = blockIdx.y, slot = a.kv.kv.slots[row];
  const std::uint64_t key = a.keys ? a.keys[row] : a.to.key(slot), start = split_mix(key, head);
  if (a.keys && head == 0 && threadIdx.x == 0) a.to.key(slot) = key;
  const int n = a.kv.tokens(row, head), wanted = a.of.keep(row, head);
  if (wanted >= n || (a.of.scores.data && n > a.of.scores.extent[2])) return;
  const auto at = [&](int t) { return a.kv.position(row, head, t); };
  const auto score = [&](int t) {
    return a.of.scores.data ? a.of.scores(row, head, t) : *a.kv.token(row, head, t).state(a.of.column);
  };
  const device::Leaving leaving =
      device::find_surplus(at, score, !a.of.scores.data && a.of.column < 0, n, max(0, wanted),
                           a.of.pins ? a.of.pins[row] : Pins{}, chosen, shared);
  if (leaving.count == 0) return;
  __syncthreads();
  if (leaving.count == 1)
    join(a, row, head, leaving.place, start, token, shared);
  else
    for (int word = 0; word < (n + 31) / 32; ++word)
      for (unsigned bits = chosen[word]; bits; bits &= bits - 1)
        join(a, row, head, word * 32 + __ffs(bits) - 1, start, token, shared);
  for (int i = threadIdx.x; i < a.rule.tokens(); i += threads)
    a.to.tokens.weights(slot, head, i) =
        sketch_weight(a.rule, &a.to.count(slot, head, 0), &a.to.squares(slot, head, 0), i);
}

void sketch_surplus_cuda(const PagedKv& kv, const Surplus& surplus, const SketchRule& rule, const std::uint64_t* keys,
                         const KvSketch& to, Stream s) {
  if (kv.rows == 0) return;
  if (kv.head_dim > most_dim)
    throw Error(Errc::unsupported,
                "got head_dim " + std::to_string(kv.head_dim) + ", wanted at most " + std::to_string(most_dim),
                "op sketch_surplus (CUDA)");
  const std::int64_t most = kv.table.extent[2] * kv.page_size, bytes = (most + 31) / 32 * 4;
  const std::int64_t room =
      shared_bytes() - static_cast<std::int64_t>(sizeof(device::SelectShared) + sizeof(Token)) - 1024;
  if (bytes > room)
    throw Error(Errc::unsupported,
                "got heads of up to " + std::to_string(most) + " tokens, wanted at most " + std::to_string(room * 8),
                "op sketch_surplus (CUDA)");
  if (bytes > 16 * 1024)
    check(cudaFuncSetAttribute(sketch_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(room)),
          "sketch_surplus");
  const dim3 grid(static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.rows));
  sketch_kernel<<<grid, threads, static_cast<std::size_t>(bytes), stream_of(s)>>>(
      Args{DeviceKv(kv), surplus, rule, keys, to});
  check_launch("sketch_surplus");
}

}  // namespace

KVLAB_ON_CUDA(sketch_surplus, sketch_surplus_cuda);

}  // namespace kvlab::ops
