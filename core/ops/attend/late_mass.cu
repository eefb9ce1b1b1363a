// add_late_mass: a warp's lanes turn shares that attention left into probabilities, as attention's own kernel does
// (attend_sums.cuh).
#include "ops/attend/late_mass.hpp"

#include <algorithm>
#include <cstddef>

#include "ops/attend/attend_sums.cuh"

namespace kvlab::ops {
using namespace cuda;
using decode::Args;
using decode::FourTokens;
namespace {

constexpr int threads = 128, at_once = 2, block_tokens = threads * at_once * FourTokens::count;

// Distances between layers, in the types' own units. Those of other layers are the same.
struct OfLayer {
  std::int64_t table = 0, length = 0, room = 0;

  OfLayer() = default;
  OfLayer(const LateMass& a, const LateMass& b)
      : table(b.kv.table.data - a.kv.table.data), length(b.kv.length.data - a.kv.length.data), room(b.room - a.room) {}
  bool operator==(const OfLayer&) const = default;
};

__global__ void __launch_bounds__(threads)
    late_kernel(const __grid_constant__ Args a, const __grid_constant__ OfLayer of_layer, int room) {
  let_successor_start();
  const int head = static_cast<int>(blockIdx.y), layer = static_cast<int>(blockIdx.z) / a.rows,
            row = static_cast<int>(blockIdx.z) - layer * a.rows;
  const int slot = a.slots[row];  // no kernel writes it
  wait_for_predecessor();
  const PageEntry* entries = a.table + layer * of_layer.table + slot * a.table_slot + head * a.table_head;
  const int length = a.length[layer * of_layer.length + slot * a.length_slot + head * a.length_head];
  const std::byte* shares = a.shares.of(row, head) + layer * of_layer.room;
  const float* lse = a.lse + layer * (of_layer.room / 4) + row * a.lse_row + head * a.group;
  const int shift = __ffs(a.page_size) - 1;
#pragma unroll 1
  for (int begin = static_cast<int>(blockIdx.x) * block_tokens; begin < room;
       begin += static_cast<int>(gridDim.x) * block_tokens) {
    FourTokens tokens[at_once];
    // These loads need not wait for the length.
#pragma unroll
    for (int n = 0; n < at_once; ++n) {
      const int four = begin / FourTokens::count + n * threads + static_cast<int>(threadIdx.x),
                record = four / (MassShares::tokens / FourTokens::count),
                t = four % (MassShares::tokens / FourTokens::count) * 2, place = record * MassShares::tokens + t;
      if (place >= room) continue;
      tokens[n].left = 1;
      tokens[n].page = entries[place >> shift], tokens[n].offset = place & (a.page_size - 1);
      tokens[n].take(a, shares, record, t, lse);
    }
#pragma unroll
    for (int n = 0; n < at_once; ++n) {
      const int four = begin / FourTokens::count + n * threads + static_cast<int>(threadIdx.x),
                place = four / (MassShares::tokens / FourTokens::count) * MassShares::tokens +
                        four % (MassShares::tokens / FourTokens::count) * 2;
      if (tokens[n].left > 0) tokens[n].left = length - place;
      tokens[n].ask(a);
    }
#pragma unroll
    for (int n = 0; n < at_once; ++n) tokens[n].add(a);
  }
}

Args args_of(const LateMass& of) {
  const PagedKv& kv = of.kv;
  Args a = {};
  a.table = kv.table.data, a.table_slot = kv.table.stride[0], a.table_head = kv.table.stride[1];
  a.length = kv.length.data, a.length_slot = kv.length.stride[0], a.length_head = kv.length.stride[1];
  a.slots = kv.slots, a.rows = kv.rows;
  a.base = kv.base, a.error = kv.error, a.page_size = kv.page_size;
  a.kv_heads = kv.kv_heads, a.group = of.heads / kv.kv_heads;
  a.state = FrameColumn::state(kv, of.into.column), a.rule = of.into.rule;
  a.shares.fill(of, of.heads, kv.kv_heads);
  a.lse = MassShares::lse_of(of, kv.rows, of.heads, kv.kv_heads), a.lse_row = of.heads;
  return a;
}

}  // namespace

static void add_late_mass_cuda(std::span<const LateMass> layers, Stream s) {
  for (std::size_t begin = 0, end = 0; begin < layers.size(); begin = end) {
    const LateMass& first = layers[begin];
    if (first.kv.rows == 0) {
      end = begin + 1;
      continue;
    }
    const std::size_t most = std::max<std::size_t>(1, 65535 / static_cast<std::size_t>(first.kv.rows));
    OfLayer next;
    for (end = begin + 1; end < layers.size() && end - begin < most; ++end) {
      const OfLayer to_here(layers[end - 1], layers[end]);
      if (end == begin + 1) next = to_here;
      if (!(to_here == next) || layers[end].kv.rows != first.kv.rows || layers[end].tokens != first.tokens) break;
    }
    const Args a = args_of(first);
    const int room = std::min(first.tokens, static_cast<int>(first.kv.table.extent[2]) * a.page_size);
    const dim3 grid(static_cast<unsigned>((room + block_tokens - 1) / block_tokens),
                    static_cast<unsigned>(first.kv.kv_heads),
                    static_cast<unsigned>(end - begin) * static_cast<unsigned>(first.kv.rows));
    launch("add_late_mass", late_kernel, grid, threads, 0, stream_of(s), true, a, next, room);
  }
}
KVLAB_ON_CUDA(add_late_mass, add_late_mass_cuda);

}  // namespace kvlab::ops
