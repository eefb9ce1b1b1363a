// References of kvlab/centres.hpp.
#pragma once
#include <kvlab/centres.hpp>

namespace kvlab::ops {

void tokens_beyond_reference(const PagedKv& kv, View<const float, 3> scores, double share, TokenList list);
void farthest_first_reference(const KvRows& rows, int count, Scores nearest, Scores out);

}  // namespace kvlab::ops
