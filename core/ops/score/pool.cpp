#include <kvlab/ops.hpp>

#include <algorithm>
#include <limits>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/score/group.hpp"

namespace kvlab::ops {

void pool_row(const float* in, int n, Pooling kind, int kernel, float* out) {
  const int half = kernel / 2;
  for (int t = 0; t < n; ++t) {
    float x = in[t - half];
    for (int i = 1 - half; i <= half; ++i) x = kind == Pooling::max ? std::max(x, in[t + i]) : x + in[t + i];
    out[t] = kind == Pooling::max ? x : x / static_cast<float>(kernel);
  }
}

void pool(const PagedKv& kv, Scores scores, Pooling kind, int kernel, int excluded, Workspace& w, Stream s,
          const Heads& which) {
  check_kv(kv, "pool", s);
  check_scores(kv, scores, "scores", "pool", s);
  if (kernel < 1 || kernel % 2 == 0)
    fail(Errc::unsupported, "pool", "got a kernel of " + std::to_string(kernel) + ", wanted an odd one");
  if (excluded < 0) fail(Errc::internal, "pool", "got " + std::to_string(excluded) + " excluded tokens");
  if (kind == Pooling::none || kernel == 1) return;
  if (s.device() == Device::cuda) return on_cuda<pool>(kv, scores, kind, kernel, excluded, w, s, which);
  const int heads = static_cast<int>(scores.extent[1]), group = heads / kv.kv_heads, half = kernel / 2;
  const float edge = kind == Pooling::max ? -std::numeric_limits<float>::infinity() : 0.f;
  auto copies = take_scratch<float>(w, "pool", {kv.rows, heads, longest(kv) + 2 * half});
#pragma omp parallel for collapse(2) schedule(dynamic) if (worth_threads(std::int64_t{kv.rows} * heads * longest(kv)))
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < heads; ++h) {
      const int n = kv.tokens(r, h / group) - excluded;
      if (n <= 0 || !which.on(kv.slots[r], h / group)) continue;
      float* copy = &copies(r, h, 0);
      std::fill_n(copy, half, edge);
      std::copy_n(&scores(r, h, 0), n, copy + half);
      std::fill_n(copy + half + n, half, edge);
      pool_row(copy + half, n, kind, kernel, &scores(r, h, 0));
    }
}

}  // namespace kvlab::ops
