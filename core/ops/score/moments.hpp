// The op expected_query, its kernel and its tests share mean_turn.
#pragma once
#include <cmath>

#include "base/on_both.hpp"

namespace kvlab::ops {

// Mean of cos and sin of the angles position * frequency, over `count` positions from `first` on.
struct MeanTurn {
  double cosine, sine;
};
KVLAB_ON_BOTH inline MeanTurn mean_turn(double frequency, int first, int count) {
  // The sum of e^(i angle) over equal steps f is that of the middle angle times sin(count f / 2) / sin(f / 2).
  const double middle = (first + (count - 1) / 2.) * frequency, step = sin(frequency / 2);
  const double size = fabs(step) < 1e-12 ? 1 : sin(count * frequency / 2) / (count * step);
  return {cos(middle) * size, sin(middle) * size};
}

}  // namespace kvlab::ops
