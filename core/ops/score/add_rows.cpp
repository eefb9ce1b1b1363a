#include "ops/score/add_rows.hpp"

#include "base/device_op.hpp"
#include "ops/page/check.hpp"

namespace kvlab::ops {

void add_rows(View<const float, 3> mass, View<float, 2> sums, Stream s) {
  if (mass.extent[1] < sums.extent[0] || mass.extent[2] < sums.extent[1])
    fail(Errc::internal, "add_rows", "got mass of fewer heads or places than sums, wanted those of sums");
  if (s.device() == Device::cuda) return on_cuda<add_rows>(mass, sums, s);
  for (std::int64_t row = 0; row < mass.extent[0]; ++row)
    for (std::int64_t head = 0; head < sums.extent[0]; ++head)
      for (std::int64_t i = 0; i < sums.extent[1]; ++i) sums(head, i) += mass(row, head, i);
}

}  // namespace kvlab::ops
