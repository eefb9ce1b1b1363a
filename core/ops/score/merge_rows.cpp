// How far the rows of two layers are apart, and one direction for both.
#include "ops/score/merge_rows.hpp"

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/score/channels.hpp"

namespace kvlab::ops {
namespace {

RowPair pair_of(const float* a, const float* b, int dim) {
  RowPair p{};
  for (int d = 0; d < dim; ++d) {
    const double x = a[d], y = b[d];
    p.aa += x * x, p.bb += y * y, p.ab += x * y;
  }
  return p;
}

void merge(float* a, float* b, int dim, double t) {
  const RowPair p = pair_of(a, b, dim);
  if (!p.defined()) return;
  const RowPair::Weights w = p.weights(t);
  const double of_a = std::sqrt(p.aa), of_b = std::sqrt(p.bb);
  for (int d = 0; d < dim; ++d) {
    const double direction = w.of_a * double{a[d]} + w.of_b * double{b[d]};
    a[d] = static_cast<float>(of_a * direction), b[d] = static_cast<float>(of_b * direction);
  }
}

}  // namespace

void row_distance(const PagedKv& kv, View<const float, 4> a, View<const float, 4> b, Scores out, Stream s) {
  const char* op = "row_distance";
  check_kv(kv, op, s);
  check_rows(kv, a, op, s);
  check_rows(kv, b, op, s);
  check_kv_scores(kv, out, "out", op, s);
  if (s.device() == Device::cuda) return on_cuda<row_distance>(kv, a, b, out, s);
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      for (int t = 0; t < kv.tokens(r, h); ++t)
        out(r, h, t) = pair_of(&a(r, h, t, 0), &b(r, h, t, 0), kv.head_dim).distance();
}

void merge_rows(const PagedKv& kv, float t, const TokenList& exact, View<float, 4> a, View<float, 4> b, Stream s) {
  const char* op = "merge_rows";
  check_kv(kv, op, s);
  check_rows(kv, a, op, s);
  check_rows(kv, b, op, s);
  check_list(kv, exact, op);
  if (!(t >= 0 && t <= 1)) fail(Errc::internal, op, "got t " + std::to_string(t) + ", wanted 0 to 1");
  if (s.device() == Device::cuda) return on_cuda<merge_rows>(kv, t, exact, a, b, s);
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      int next = 0;  // of the list, which ascends
      for (int i = 0; i < kv.tokens(r, h); ++i) {
        if (next < exact.count(exact.at(r), h) && exact.index(exact.at(r), h, next) == i) {
          ++next;
          continue;
        }
        merge(&a(r, h, i, 0), &b(r, h, i, 0), kv.head_dim, double{t});
      }
    }
}

}  // namespace kvlab::ops
