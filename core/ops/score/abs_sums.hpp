// The reduction behind LayerKv::projected_norms.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>

namespace kvlab::ops {

// scores[0, kv_head, first + i] += factor * the sum of |rows[i, :]|, or = where `begins`. kv has one row. Tokens that
// the head does not hold are left alone. Sums are in f64. Errc::internal: rows with a stride between their entries, or
// of more tokens than the scores have. Bytes: the rows.
void add_abs_sums(const PagedKv& kv, int kv_head, int first, View<const float, 2> rows, float factor, bool begins,
                  Scores scores, Stream s);

}  // namespace kvlab::ops
