// The op copy_rows in plain loops.
#include "ops/score/reference.hpp"

namespace kvlab::ops {

void copy_rows_reference(const PagedKv& kv, const TokenList& tokens, View<const float, 4> from, View<float, 4> to) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      for (int i = 0; i < tokens.count(tokens.at(r), h); ++i)
        for (int d = 0; d < kv.head_dim; ++d) {
          const int t = tokens.index(tokens.at(r), h, i);
          to(r, h, t, d) = from(r, h, t, d);
        }
}

}  // namespace kvlab::ops
