#include "ops/select/centres.hpp"

#include <algorithm>
#include <limits>
#include <string>

#include "base/device_op.hpp"
#include "base/per_thread.hpp"
#include "ops/page/check.hpp"
#include "ops/page/paged.hpp"

namespace kvlab::ops {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

void find_centres(const float* rows, int n, int dim, int count, float* nearest, float* out) {
  std::fill_n(out, n, 0.f);
  for (int i = 0; i < count; ++i) {
    const int centre = static_cast<int>(std::max_element(nearest, nearest + n) - nearest);
    if (n == 0 || nearest[centre] == -infinity) return;
    out[centre] = static_cast<float>(count - i);
    nearest[centre] = -infinity;
    const float* c = rows + std::int64_t{centre} * dim;
    for (int t = 0; t < n; ++t) {
      if (nearest[t] == -infinity) continue;
      const float* x = rows + std::int64_t{t} * dim;
      double sum = 0;
      for (int d = 0; d < dim; ++d) sum += (double{x[d]} - double{c[d]}) * (double{x[d]} - double{c[d]});
      nearest[t] = i == 0 ? static_cast<float>(sum) : std::min(nearest[t], static_cast<float>(sum));
    }
  }
}

}  // namespace

void tokens_beyond(const PagedKv& kv, View<const float, 3> scores, double share, TokenList list, Stream s) {
  const char* op = "tokens_beyond";
  check_kv(kv, op, s);
  check_kv_scores(kv, scores, "scores", op, s);
  check_list(kv, list, op);
  if (!(share >= 0 && share <= 1))
    fail(Errc::internal, op, "got a share of " + std::to_string(share) + ", wanted 0 to 1");
  if (s.device() == Device::cuda) return on_cuda<tokens_beyond>(kv, scores, share, list, s);
  check_room(kv, list, op);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int n = kv.tokens(r, h);
      float least = infinity, greatest = -infinity;
      for (int t = 0; t < n; ++t) {
        const float x = scores(r, h, t);
        least = x < least ? x : least, greatest = x > greatest ? x : greatest;
      }
      const double threshold = double{least} + (double{greatest} - double{least}) * (1 - share);
      int count = 0;
      for (int t = 0; t < n; ++t)
        if (double{scores(r, h, t)} > threshold) list.index(list.at(r), h, count++) = t;
      list.count(list.at(r), h) = count;
    }
}

void farthest_first(const KvRows& rows, int count, Scores nearest, Scores out, Stream s) {
  const char* op = "farthest_first";
  const PagedKv& kv = resident_cache(rows.kv, op, s);
  check_kv_scores(kv, nearest, "nearest", op, s);
  check_kv_scores(kv, out, "out", op, s);
  if (count < 1) fail(Errc::internal, op, "got " + std::to_string(count) + " centres, wanted at least 1");
  if (kv.rope == RopeRegime::cache_relative)
    fail(Errc::unsupported, op, "got keys before RoPE (cache_relative), wanted keys that are stored as rotated");
  if (s.device() == Device::cuda) return on_cuda<farthest_first>(rows, count, nearest, out, s);
  PerThread<float> room(static_cast<std::size_t>(longest(kv)) * static_cast<std::size_t>(kv.head_dim));
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      float* own = room.own().data();
      gather_rows(kv, r, h, rows.side, kv.tokens(r, h), own);
      find_centres(own, kv.tokens(r, h), kv.head_dim, count, &nearest(r, h, 0), &out(r, h, 0));
    }
}

}  // namespace kvlab::ops
