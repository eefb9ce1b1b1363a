// turned_heads of another op's launch, and heads that turn by a drawn pattern (`inject` of an experiment).
#pragma once
#include <kvlab/ops.hpp>

#include <cstdint>

#include "ops/page/injected.hpp"

namespace kvlab::ops {

// Replaces the cosines of turned_heads. A hash of seed, sequence, layer, KV head and call decides which heads turn.
struct InjectedTurns {
  std::int32_t share = 0;                   // millionths of the heads
  const std::uint32_t* sequence = nullptr;  // [slot] number of the sequence
  View<std::uint32_t, 1> calls;             // [slot] calls so far in this layer; zero = a new sequence
  int layer = 0;
  std::uint64_t seed = 0;

  // Lies below or above every cosine.
  constexpr float cosine(int slot, int head, std::uint32_t call) const {
    const std::uint64_t drawn = inject_stream(seed, layer, sequence[slot], head, call) >> 32;
    return static_cast<std::int32_t>(drawn * 1'000'000 >> 32) < share ? -2.f : 2.f;
  }
};

// A call of turned_heads on CUDA that waits (base/put_off.hpp), or null. A choice among the heads that it flags, and
// attention, may do its work.
struct PutOffTurns {
  Tensor<3> queries;
  PagedKv kv;
  View<float, 3> last;
  float threshold;
  HeadFlags turned;
  Stream stream = Stream::cpu();

  bool flags(const Heads& heads) const {
    return heads.flags.data == turned.data && heads.flags.stride == turned.stride && !heads.steps && !heads.classes;
  }
};
const PutOffTurns* put_off_turns();

}  // namespace kvlab::ops
