#include "ops/score/random_scores.hpp"

#include <kvlab/ops.hpp>

#include <vector>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/page/paged.hpp"

namespace kvlab::ops {

void random_scores(const PagedKv& kv, const std::uint64_t* keys, Scores out, Stream s) {
  const char* op = "random_scores";
  check_kv(kv, op, s);
  check_kv_scores(kv, out, "out", op, s);
  if (!keys) fail(Errc::internal, op, "got no keys, wanted one for each row");
  if (s.device() == Device::cuda) return on_cuda<random_scores>(kv, keys, out, s);
  thread_local std::vector<std::int32_t> position;
  position.resize(static_cast<std::size_t>(longest(kv)));
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const std::uint64_t head = split_mix(keys[r], h);
      token_positions(kv, r, h, kv.tokens(r, h), position.data());
      for (int t = 0; t < kv.tokens(r, h); ++t) out(r, h, t) = draw_at(head, position[static_cast<std::size_t>(t)]);
    }
}

}  // namespace kvlab::ops
