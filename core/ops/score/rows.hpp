// One op implements ops::row_dot, row_cosine and listed_row_dot.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>

#include "ops/score/range_codes.hpp"

namespace kvlab::ops {

struct RowProduct {
  bool cosine = false;
  const PageList* pages = nullptr;  // null = all; tokens of other pages get -inf
  int bits = 0;                     // see listed_row_dot
};

void row_product(const KvRows& rows, View<const float, 3> vectors, const RowProduct& how, Scores out, Stream s);

// What the nearest code of so many bits gives for x, an element of a row that reaches from `least` to `greatest`. NaN
// stays.
constexpr float rounded_to_code(float x, float least, float greatest, int bits) {
  const float step = range_step(least, greatest, bits);
  return step > 0 && x == x ? least + step * static_cast<float>(range_code(x, least, step, bits)) : x;
}

}  // namespace kvlab::ops
