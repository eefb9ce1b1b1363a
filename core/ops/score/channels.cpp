// How much a key channel counts, and channels that become zeros.
#include "ops/score/channels.hpp"

#include <algorithm>

#include "base/device_op.hpp"
#include "base/per_thread.hpp"
#include "ops/page/check.hpp"

namespace kvlab::ops {
namespace {

// Adds the squares of a row.
void add_squares(const float* x, int dim, double* sums) {
  for (int d = 0; d < dim; ++d) sums[d] += double{x[d]} * double{x[d]};
}

void check_of_heads(const PagedKv& kv, const View<const float, 3>& x, const char* op) {
  if (x.extent[0] < kv.rows || x.extent[1] != kv.kv_heads || x.extent[2] != kv.head_dim)
    fail(Errc::internal, op, "got energies of another shape, wanted [row, kv_head, head_dim]");
}

}  // namespace

void check_rows(const PagedKv& kv, const View<const float, 4>& rows, const char* op, Stream s) {
  if (rows.extent[0] < kv.rows || rows.extent[1] != kv.kv_heads || rows.extent[3] != kv.head_dim ||
      (s.device() == Device::cpu && rows.extent[2] < longest(kv)))
    fail(Errc::internal, op, "got rows of another shape, wanted [row, kv_head, token, head_dim]");
  if (rows.stride[3] != 1) fail(Errc::unsupported, op, "got strided rows, wanted head_dim contiguous");
}

void check_range(const PagedKv& kv, const RowRange& range, const char* op) {
  if (range.from.data && (range.from.extent[0] < kv.rows || range.from.extent[1] < kv.kv_heads))
    fail(Errc::internal, op, "got first places of another shape, wanted [row, kv_head]");
  if (range.least < 0)
    fail(Errc::internal, op, "got a least place of " + std::to_string(range.least) + ", wanted 0 or more");
}

void channel_energy(const Tensor<4>& tensor, const PagedKv& kv, View<const float, 4> rows, View<float, 3> out,
                    Stream s) {
  const char* op = "channel_energy";
  check_kv(kv, op, s);
  check_rows(kv, rows, op, s);
  check_of_heads(kv, out, op);
  if (tensor.dtype != DType::f32)
    fail(Errc::unsupported, op, std::string("got queries of ") + name_of(tensor.dtype) + ", wanted f32");
  const View<const float, 4> q = tensor.f32();
  if (q.extent[0] < kv.rows || q.extent[1] < 1 || q.extent[1] % kv.kv_heads || q.extent[3] != kv.head_dim)
    fail(Errc::internal, op, "got queries of another shape, wanted [row, query head, query, head_dim]");
  if (q.stride[3] != 1) fail(Errc::unsupported, op, "got strided queries, wanted head_dim contiguous");
  if (s.device() == Device::cuda) return on_cuda<channel_energy>(tensor, kv, rows, out, s);
  const int dim = kv.head_dim, group = static_cast<int>(q.extent[1]) / kv.kv_heads;
  PerThread<double> room(static_cast<std::size_t>(2 * dim));
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const auto sums = room.own(), of_queries = sums.first(sums.size() / 2), of_rows = sums.last(sums.size() / 2);
      std::fill(sums.begin(), sums.end(), 0.);
      for (int g = 0; g < group; ++g)
        for (std::int64_t i = 0; i < q.extent[2]; ++i) add_squares(&q(r, h * group + g, i, 0), dim, of_queries.data());
      const int n = kv.tokens(r, h);
      for (int t = 0; t < n; ++t) add_squares(&rows(r, h, t, 0), dim, of_rows.data());
      const double queries = std::max<double>(1, static_cast<double>(group * q.extent[2])), tokens = std::max(1, n);
      for (std::size_t d = 0; d < of_rows.size(); ++d)
        out(r, h, static_cast<std::int64_t>(d)) = static_cast<float>(of_queries[d] / queries * (of_rows[d] / tokens));
    }
}

void zero_channels(const PagedKv& kv, View<const float, 3> energy, int count, int newest, View<float, 4> rows,
                   Stream s) {
  const char* op = "zero_channels";
  check_kv(kv, op, s);
  check_rows(kv, rows, op, s);
  check_of_heads(kv, energy, op);
  if (count < 0 || count > kv.head_dim || newest < 0)
    fail(Errc::internal, op,
         "got " + std::to_string(count) + " channels and " + std::to_string(newest) +
             " newest tokens, wanted 0 to head_dim and 0 or more");
  if (s.device() == Device::cuda) return on_cuda<zero_channels>(kv, energy, count, newest, rows, s);
  PerThread<int> orders(static_cast<std::size_t>(kv.head_dim));
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const auto order = orders.own();
      for (std::size_t d = 0; d < order.size(); ++d) order[d] = static_cast<int>(d);
      std::sort(order.begin(), order.end(),
                [&](int a, int b) { return goes_first(energy(r, h, a), a, energy(r, h, b), b); });
      for (int t = 0; t < kv.tokens(r, h) - newest; ++t)
        for (int i = 0; i < count; ++i) rows(r, h, t, order[static_cast<std::size_t>(i)]) = 0;
    }
}

}  // namespace kvlab::ops
