// The work of ops::score_pages after its checks.
#pragma once
#include <kvlab/ops.hpp>

namespace kvlab::ops {

void chosen_pages(const Tensor<3>& queries, const PagedKv& kv, const Summaries& summaries, const PageChoice& choice,
                  Scores scores, PageList out, Stream s);

}  // namespace kvlab::ops
