// One op implements ops::row_dot, row_cosine and listed_row_dot.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>

#include "ops/page/codes.hpp"

namespace kvlab::ops {

struct RowProduct {
  bool cosine = false;
  const PageList* pages = nullptr;  // null = all; tokens of other pages get -inf
  int bits = 0;                     // see listed_row_dot
};

void row_product(const KvRows& rows, View<const float, 3> vectors, const RowProduct& how, Scores out, Stream s);

// What the nearest code of so many bits gives for x, an element of a row that reaches from `least` to `greatest`. All
// of it is f32, which decides ties. NaN stays.
constexpr float rounded_to_code(float x, float least, float greatest, int bits) {
  CodecSide side;
  side.bits = static_cast<std::uint8_t>(bits);
  const float scale = (greatest - least) / static_cast<float>(most_code(bits));
  return scale > 0 && x == x ? least + scale * static_cast<float>(nearest_code(side, (x - least) / scale)) : x;
}

}  // namespace kvlab::ops
