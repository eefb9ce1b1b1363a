// Work of heads that is spread over steps: a block for each layer, a thread for each head of a row.
#include "base/cuda.cuh"
#include "base/device_op.hpp"
#include "base/joined_calls.hpp"
#include "ops/select/spread.hpp"

namespace kvlab::ops {
using namespace cuda;
namespace {

constexpr int threads = 128;
constexpr std::size_t most_layers = 32;  // of a launch

struct Layer {
  const std::int32_t* slots;
  HeadFlags marked, waits, due;
  SpreadRule rule;
};
struct Layers {
  Layer of[most_layers];
  int rows, heads;
};

__global__ void __launch_bounds__(threads) spread_kernel(const __grid_constant__ Layers all) {
  const Layer& a = all.of[blockIdx.x];
  for (int i = static_cast<int>(threadIdx.x); i < all.rows * all.heads; i += threads) {
    const int slot = a.slots[i / all.heads], head = i % all.heads;
    spread_head(a.rule, a.marked(slot, head) != 0, a.rule.counts[slot], a.rule.places[head], a.waits(slot, head),
                a.due(slot, head));
  }
}

__global__ void forget_kernel(const std::int32_t* slots, const __grid_constant__ HeadFlags waits, int heads) {
  for (int head = static_cast<int>(threadIdx.x); head < heads; head += static_cast<int>(blockDim.x))
    waits(slots[blockIdx.x], head) = 0;
}

void run(std::span<const SpreadHeads> calls) {
  Layers all;
  all.rows = calls[0].kv.rows, all.heads = calls[0].kv.kv_heads;
  if (all.rows == 0) return;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const SpreadHeads& c = calls[i];
    all.of[i] = {c.kv.slots, c.marked, c.waits, c.due, c.rule};
  }
  spread_kernel<<<static_cast<unsigned>(calls.size()), threads, 0, stream_of(calls[0].stream)>>>(all);
  check_launch("spread_heads");
}

}  // namespace

static void spread_in_layers_cuda(const std::vector<SpreadHeads>& calls) {
  const auto common_of = [](const SpreadHeads& c) { return std::tuple(c.kv.rows, c.kv.kv_heads, c.stream.handle()); };
  for_each_alike(std::span(calls), most_layers, common_of, run);
}
KVLAB_ON_CUDA(spread_in_layers, spread_in_layers_cuda);

static void spread_heads_cuda(const PagedKv& kv, HeadFlags marked, const SpreadRule& rule, HeadFlags waits,
                              HeadFlags due, Stream s) {
  const SpreadHeads call{kv, marked, rule, waits, due, s};
  run({&call, 1});
}
KVLAB_ON_CUDA(spread_heads, spread_heads_cuda);

static void forget_waiting_cuda(const PagedKv& kv, HeadFlags waits, Stream s) {
  if (kv.rows == 0) return;
  forget_kernel<<<static_cast<unsigned>(kv.rows), 32, 0, stream_of(s)>>>(kv.slots, waits, kv.kv_heads);
  check_launch("forget_waiting");
}
KVLAB_ON_CUDA(forget_waiting, forget_waiting_cuda);

}  // namespace kvlab::ops
