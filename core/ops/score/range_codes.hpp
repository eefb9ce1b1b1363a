// Codes of a row by its range, on both devices: 2^bits steps from the row's least number to its greatest. All of it is
// f32, which decides ties.
#pragma once
#include "ops/page/codes.hpp"

namespace kvlab::ops {

// A step. 0 of no numbers, and where all are equal.
constexpr float range_step(float least, float greatest, int bits) {
  return least < greatest ? (greatest - least) / static_cast<float>(most_code(bits)) : 0.f;
}
// The nearest code; 0 of NaN, and where the step is none.
constexpr std::uint32_t range_code(float x, float least, float step, int bits) {
  return step > 0 ? nearest_code(CodecSide{static_cast<std::uint8_t>(bits)}, (x - least) / step) : 0u;
}

}  // namespace kvlab::ops
