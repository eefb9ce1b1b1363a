// The work of ops::top_tokens after its checks.
#pragma once
#include <kvlab/ops.hpp>

namespace kvlab::ops {

void chosen_tokens(const PagedKv& kv, View<const float, 3> scores, const TokenChoice& choice, TokenList list, Stream s);

}  // namespace kvlab::ops
