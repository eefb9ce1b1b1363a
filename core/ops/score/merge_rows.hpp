// The ops row_distance and merge_rows and their kernels share what two rows of a token give.
#pragma once
#include <kvlab/rewrite.hpp>

#include <cmath>

#include "base/on_both.hpp"

namespace kvlab::ops {

// Of two rows of a token: a . a, b . b and a . b.
struct RowPair {
  double aa, bb, ab;

  // The cosine of their angle; -1 if one of them is 0, or if they are opposite but for rounding.
  KVLAB_ON_BOTH double cosine() const {
    if (!(aa > 0 && bb > 0)) return -1;
    const double c = ab / (sqrt(aa) * sqrt(bb));
    return c > 1 ? 1 : c < opposite ? -1 : c;
  }
  KVLAB_ON_BOTH float distance() const { return static_cast<float>(acos(cosine()) / 3.14159265358979323846); }

  // a' = |a| (of_a a + of_b b) has the direction between, and so has b' with |b|: `of` is that of unit rows, divided by
  // the length of the result.
  struct Weights {
    double of_a, of_b;
  };
  KVLAB_ON_BOTH Weights weights(double t) const {
    const double c = cosine(), angle = acos(c), sine = sin(angle);
    // Where they point alike, the circle is a line.
    const double x = sine < alike ? 1 - t : sin((1 - t) * angle) / sine, y = sine < alike ? t : sin(t * angle) / sine;
    const double length = sqrt(x * x + y * y + 2 * x * y * c);
    return {x / length / sqrt(aa), y / length / sqrt(bb)};
  }
  KVLAB_ON_BOTH bool defined() const { return cosine() > -1; }

  static constexpr double opposite = -1 + 1e-9, alike = 1e-6;
};

}  // namespace kvlab::ops
