// Adds the attention mass of several rows.
#pragma once
#include <kvlab/stream.hpp>
#include <kvlab/view.hpp>

namespace kvlab::ops {

// sums[head, i] += mass[row, head, i] over all rows, in their order. Bytes: mass, and sums twice.
void add_rows(View<const float, 3> mass, View<float, 2> sums, Stream s);

}  // namespace kvlab::ops
