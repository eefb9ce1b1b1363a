// Rows that become what a codebook would store.
#include "ops/score/codebooks.hpp"

#include <algorithm>
#include <span>
#include <string>

#include "base/device_op.hpp"
#include "base/per_thread.hpp"
#include "ops/page/check.hpp"
#include "ops/score/channels.hpp"

namespace kvlab::ops {
namespace {

void check_coding(const PagedKv& kv, const Coding& how, const char* op) {
  const Codebook& b = how.book;
  if (!b.centres || !b.levels || b.centres.extent[0] < 1 || b.centres.extent[0] > 256 ||
      b.levels.extent[0] != b.centres.extent[0])
    fail(Errc::internal, op,
         "got a codebook of " + std::to_string(b.centres.extent[0]) + " centres and " +
             std::to_string(b.levels.extent[0]) + " levels, wanted 1 to 256 of both");
  if (b.centres.stride[0] != 1 || b.levels.stride[0] != 1)
    fail(Errc::unsupported, op, "got a strided codebook, wanted it contiguous");
  check_range(kv, how.range, op);
}

void check_thresholds(const PagedKv& kv, const View<const float, 2>& x, const char* op) {
  if (!x || x.extent[0] != kv.kv_heads || x.extent[1] != kv.head_dim)
    fail(Errc::internal, op, "got thresholds of another shape, wanted [kv_head, head_dim]");
  if (x.stride[1] != 1) fail(Errc::unsupported, op, "got strided thresholds, wanted head_dim contiguous");
}

double quantile_of(std::span<std::uint32_t> orders, double quantile) {
  const QuantileAt at(quantile, static_cast<int>(orders.size()));
  const auto low = orders.begin() + at.low;
  std::nth_element(orders.begin(), low, orders.end());
  const double a = from_ordered(*low);
  if (!(at.part > 0)) return a;
  return a + at.part * (double{from_ordered(*std::min_element(low + 1, orders.end()))} - a);
}

}  // namespace

void code_channels(const PagedKv& kv, View<const float, 2> lower, View<const float, 2> upper, const Coding& how,
                   View<float, 4> rows, Stream s) {
  const char* op = "code_channels";
  check_kv(kv, op, s);
  check_rows(kv, rows, op, s);
  check_coding(kv, how, op);
  check_thresholds(kv, lower, op);
  check_thresholds(kv, upper, op);
  if (s.device() == Device::cuda) return on_cuda<code_channels>(kv, lower, upper, how, rows, s);
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      for (int t = how.range.first(r, h); t < kv.tokens(r, h); ++t)
        for (int d = 0; d < kv.head_dim; ++d) {
          float& x = rows(r, h, t, d);
          x = coded(x, {double{lower(h, d)}, double{upper(h, d)}}, how);
        }
}

void code_tokens(const PagedKv& kv, double outliers, const Coding& how, View<float, 4> rows, Stream s) {
  const char* op = "code_tokens";
  check_kv(kv, op, s);
  check_rows(kv, rows, op, s);
  check_coding(kv, how, op);
  if (!(outliers >= 0 && outliers < 1))
    fail(Errc::internal, op, "got outliers " + std::to_string(outliers) + ", wanted a share below 1");
  if (s.device() == Device::cuda) return on_cuda<code_tokens>(kv, outliers, how, rows, s);
  PerThread<std::uint32_t> room(static_cast<std::size_t>(kv.kv_heads) * static_cast<std::size_t>(kv.head_dim));
  for (int r = 0; r < kv.rows; ++r) {
    int n = 0;
    for (int h = 0; h < kv.kv_heads; ++h) n = std::max(n, kv.tokens(r, h));
#pragma omp parallel for schedule(dynamic, 16) if (worth_threads(std::int64_t{n} * kv.kv_heads * kv.head_dim))
    for (int t = 0; t < n; ++t) {
      const auto in_range = [&](int h) { return t >= how.range.first(r, h) && t < kv.tokens(r, h); };
      std::size_t count = 0;
      for (int h = 0; h < kv.kv_heads; ++h)
        for (int d = 0; in_range(h) && d < kv.head_dim; ++d) room.own()[count++] = ordered(rows(r, h, t, d));
      if (count == 0) continue;
      const auto orders = room.own().first(count);
      const double lower = quantile_of(orders, outliers / 2);
      const Thresholds of_token{lower, quantile_of(orders, 1 - outliers / 2)};
      for (int h = 0; h < kv.kv_heads; ++h)
        for (int d = 0; in_range(h) && d < kv.head_dim; ++d) {
          float& x = rows(r, h, t, d);
          x = coded(x, of_token, how);
        }
    }
  }
}

}  // namespace kvlab::ops
