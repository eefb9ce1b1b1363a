// One op implements ops::row_dot and row_cosine.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>

namespace kvlab::ops {

void row_product(const KvRows& rows, View<const float, 3> vectors, bool cosine, Scores out, Stream s);

}  // namespace kvlab::ops
