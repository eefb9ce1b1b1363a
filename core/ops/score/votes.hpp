// The CUDA kernels of pooled_votes, which store each logit once.
#pragma once
#include <kvlab/ops.hpp>

namespace kvlab::ops {

// rows: scratch, [row, query head, token]. false: the kernels do not serve the arguments, as on the CPU, and nothing
// was done.
bool pooled_votes_at_once(const Tensor<4>& queries, const PagedKv& kv, const VotePooling& pooling, Scores rows,
                          Scores out, Stream s, const Heads& heads);

}  // namespace kvlab::ops
