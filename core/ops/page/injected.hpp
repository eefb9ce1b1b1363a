// What an experiment injects into the ops by which a policy chooses.
#pragma once
#include <cstdint>

namespace kvlab::ops {

struct InjectArgs;
struct InjectedTurns;
struct InjectedDrift;

// What ops have replaced something of.
struct InjectedUse {
  bool lists = false, turns = false, drift = false;
};

// What replaces a policy's choices in a layer. PagedKv::injected points to it. Host memory.
struct Injected {
  const InjectArgs* lists = nullptr;     // of score_pages, which adds cache, list, pins and heads; null = its own
  const InjectedTurns* turns = nullptr;  // of turned_heads; null = its own
  InjectedUse* used = nullptr;           // an op that replaces something says so
  const InjectedDrift* drift = nullptr;  // of drifted_heads and drifted_by_logits; null = their own
};

constexpr std::uint64_t inject_mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}
constexpr std::uint64_t inject_stream(std::uint64_t seed, int layer, std::uint32_t sequence, int head,
                                      std::uint32_t step) {
  std::uint64_t x = inject_mix(seed);
  x = inject_mix(x ^ static_cast<std::uint32_t>(layer));
  x = inject_mix(x ^ sequence);
  x = inject_mix(x ^ static_cast<std::uint32_t>(head));
  return inject_mix(x ^ step);
}

}  // namespace kvlab::ops
