// Heads that turn by a drawn pattern (`inject` of an experiment) instead of by their queries.
#pragma once
#include <kvlab/view.hpp>

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

}  // namespace kvlab::ops
