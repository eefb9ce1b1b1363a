// What the random numbers of ops::random_scores are, for both devices.
#pragma once
#include <cstdint>

#include "ops/page/injected.hpp"

namespace kvlab::ops {

// Number i of the SplitMix64 sequence that starts at x, from 0 on.
constexpr std::uint64_t split_mix(std::uint64_t x, int i) {
  return inject_mix(x + 0x9e3779b97f4a7c15ull * static_cast<std::uint64_t>(i));
}

// [0, 1): the draw of a text position, of a head whose sequence starts at x.
constexpr float draw_at(std::uint64_t x, int position) {
  return static_cast<float>(split_mix(x, position) >> 40) * 0x1p-24f;
}

}  // namespace kvlab::ops
