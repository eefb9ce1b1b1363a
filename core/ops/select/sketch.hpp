// What both devices share of kvlab/sketch.hpp.
#pragma once
#include <kvlab/sketch.hpp>

#include "ops/score/random_scores.hpp"

namespace kvlab::ops {

constexpr float numerator_factor = 0x1p30f;

// A draw: a number of [0, 2^32).
constexpr std::uint64_t sketch_draw(std::uint64_t start, int i) { return split_mix(start, i) >> 32; }

// least: the squared distance to the nearest of `made` centres.
constexpr bool opens_cluster(const SketchRule& rule, int made, double least) {
  return made == 0 || (made < rule.clusters && !(least <= double{rule.radius} * double{rule.radius}));
}
constexpr bool replaces_key(std::uint64_t draw, int n) { return draw * static_cast<std::uint64_t>(n) < 1ull << 32; }
constexpr bool replaces_value(std::uint64_t draw, double square, double mu) {
  return static_cast<double>(draw) * 0x1p-32 * mu < square;
}

// The weight of made-up token i. count, squares: KvSketch's, of the head.
constexpr float sketch_weight(const SketchRule& rule, const std::int32_t* count, const double* squares,
                              std::int64_t i) {
  const std::int64_t keys = std::int64_t{rule.clusters} * rule.samples;
  if (i < keys) {
    const auto c = static_cast<std::int32_t>(i / rule.samples);
    return c < count[0] ? static_cast<float>(static_cast<double>(count[1 + c]) / rule.samples) : 0.f;
  }
  const double square = squares[1 + i - keys];
  return square > 0 ? static_cast<float>(squares[0] / (rule.values * square) / double{numerator_factor}) : 0.f;
}

void sketch_surplus_reference(const PagedKv& kv, const Surplus& surplus, const SketchRule& rule,
                              const std::uint64_t* keys, const KvSketch& to);

}  // namespace kvlab::ops
