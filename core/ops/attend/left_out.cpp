#include "ops/attend/left_out.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "base/device_op.hpp"
#include "base/per_thread.hpp"
#include "ops/page/check.hpp"
#include "ops/page/paged.hpp"

namespace kvlab::ops {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

void check_mean(const PagedKv& kv, const View<const float, 3>& mean, const char* op) {
  if (!mean || mean.extent[1] != kv.kv_heads || mean.extent[2] != kv.head_dim || mean.stride[2] != 1)
    fail(Errc::internal, op, "got mean values of another shape, wanted [slot, kv_head, head_dim]");
}

void check_share(const PagedKv& kv, const View<const float, 2>& share, const char* op) {
  if (!share || share.extent[0] < kv.rows || share.extent[1] < kv.kv_heads || share.extent[1] % kv.kv_heads)
    fail(Errc::internal, op, "got shares of another shape, wanted [row, query head]");
}

}  // namespace

void add_mean_value(const PagedKv& kv, int newest, View<float, 3> mean, Stream s) {
  const char* op = "add_mean_value";
  check_kv(kv, op, s);
  check_mean(kv, mean, op);
  if (newest < 0) fail(Errc::internal, op, "got " + std::to_string(newest) + " newest tokens, wanted 0 or more");
  if (s.device() == Device::cuda) return on_cuda<add_mean_value>(kv, newest, mean, s);
  const int dim = kv.head_dim;
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      for (int n = kv.tokens(r, h), page = (n - std::min(n, newest)) / kv.page_size; page * kv.page_size < n; ++page)
        check_page(kv, r, h, page, op);
  PerThread<float> values(static_cast<std::size_t>(dim));
  PerThread<double> sums(static_cast<std::size_t>(dim));
#pragma omp parallel for collapse(2) schedule(static) if (worth_threads(std::int64_t{kv.rows} * kv.kv_heads * newest))
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int n = kv.tokens(r, h), first = n - std::min(n, newest);
      if (first == n) continue;
      float* value = values.own().data();
      double* sum = sums.own().data();
      float* to = &mean(kv.slots[r], h, 0);
      for (int d = 0; d < dim; ++d) sum[d] = first > 0 ? double{to[d]} * first : 0;
      for (int t = first; t < n; ++t) {
        const PageEntry& e = kv.entry(r, h, t / kv.page_size);
        read_row(kv.frame(e), kv.layout(e), KvSide::value, t % kv.page_size, value);
        for (int d = 0; d < dim; ++d) sum[d] += double{value[d]};
      }
      for (int d = 0; d < dim; ++d) to[d] = static_cast<float>(sum[d] / n);
    }
}

void listed_share(const PagedKv& kv, View<const float, 3> scores, const TokenList& list, View<float, 2> share,
                  Stream s) {
  const char* op = "listed_share";
  check_kv(kv, op, s);
  check_scores(kv, scores, "scores", op, s);
  check_share(kv, share, op);
  if (share.extent[1] != scores.extent[1] || list.index.extent[1] < kv.kv_heads || list.count.extent[1] < kv.kv_heads)
    fail(Errc::internal, op, "got shares or a list of other heads, wanted those of the scores, and KV heads");
  if (s.device() == Device::cuda) return on_cuda<listed_share>(kv, scores, list, share, s);
  const int heads = static_cast<int>(scores.extent[1]), group = heads / kv.kv_heads;
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      for (int i = 0; i < list.count(list.at(r), h); ++i)
        if (const int t = list.index(list.at(r), h, i); t < 0 || t >= kv.tokens(r, h))
          fail(Errc::internal, op,
               "got token " + std::to_string(t) + " in a list, wanted one of " + std::to_string(kv.tokens(r, h)));
#pragma omp parallel for collapse(2) schedule(static) if (worth_threads(std::int64_t{kv.rows} * heads * longest(kv)))
  for (int r = 0; r < kv.rows; ++r)
    for (int q = 0; q < heads; ++q) {
      const float* of = &scores(r, q, 0);
      const int h = q / group, n = kv.tokens(r, h);
      const std::int64_t at = list.at(r);
      float most = -infinity;
      for (int t = 0; t < n; ++t) most = std::fmax(most, of[t]);
      const auto weight = [&](int t) { return of[t] > -infinity ? double{std::exp(of[t] - most)} : 0.; };
      double all = 0, listed = 0;
      for (int t = 0; t < n; ++t) all += weight(t);
      for (int i = 0; i < list.count(at, h); ++i) listed += weight(list.index(at, h, i));
      share(r, q) = all > 0 ? static_cast<float>(listed / all) : 1.f;
    }
}

void blend_left_out(const PagedKv& kv, const LeftOut& what, View<float, 3> out, void* rounded, Stream s) {
  check_share(kv, what.share, "blend_left_out");
  check_mean(kv, what.mean, "blend_left_out");
  if (s.device() == Device::cuda) return on_cuda<blend_left_out>(kv, what, out, rounded, s);
  const std::int64_t heads = out.extent[1], group = heads / kv.kv_heads;
  for (int r = 0; r < kv.rows; ++r)
    for (std::int64_t q = 0; q < heads; ++q) {
      const float share = what.share(r, q), *mean = &what.mean(kv.slots[r], q / group, 0);
      float* y = &out(r, q, 0);
      for (int d = 0; d < kv.head_dim; ++d) y[d] = share * y[d] + (1 - share) * mean[d];
    }
}

}  // namespace kvlab::ops
