// Arithmetic on scores, entry by entry, with a number.
#include <kvlab/ops.hpp>

#include <cmath>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"

namespace kvlab::ops {
namespace {

template <class F>
void each(const Scores& x, F f) {
#pragma omp parallel for collapse(2) if (worth_threads(x.extent[0] * x.extent[1] * x.extent[2]))
  for (std::int64_t r = 0; r < x.extent[0]; ++r)
    for (std::int64_t h = 0; h < x.extent[1]; ++h)
      for (std::int64_t t = 0; t < x.extent[2]; ++t) x(r, h, t) = f(x(r, h, t));
}

}  // namespace

void above(Scores x, float threshold, Stream s) {
  if (s.device() == Device::cuda) return on_cuda<above>(x, threshold, s);
  each(x, [=](float y) { return y > threshold ? 1.f : 0.f; });
}

void logarithm(Scores x, float add, Stream s) {
  if (s.device() == Device::cuda) return on_cuda<logarithm>(x, add, s);
  each(x, [=](float y) { return std::log(y + add); });
}

}  // namespace kvlab::ops
