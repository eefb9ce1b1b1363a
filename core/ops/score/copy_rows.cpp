// Rows that become those of another view.
#include <kvlab/rewrite.hpp>

#include <algorithm>
#include <string>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/score/channels.hpp"

namespace kvlab::ops {

void copy_rows(const PagedKv& kv, const TokenList& tokens, View<const float, 4> from, View<float, 4> to, Stream s) {
  const char* op = "copy_rows";
  check_kv(kv, op, s);
  check_rows(kv, from, op, s);
  check_rows(kv, to, op, s);
  check_list(kv, tokens, op);
  if (s.device() == Device::cuda) return on_cuda<copy_rows>(kv, tokens, from, to, s);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      for (int i = 0; i < tokens.count(tokens.at(r), h); ++i) {
        const int t = tokens.index(tokens.at(r), h, i);
        if (t < 0 || t >= kv.tokens(r, h))
          fail(Errc::internal, op,
               "got place " + std::to_string(t) + ", wanted one of " + std::to_string(kv.tokens(r, h)) + " tokens");
        std::copy_n(&from(r, h, t, 0), kv.head_dim, &to(r, h, t, 0));
      }
}

}  // namespace kvlab::ops
