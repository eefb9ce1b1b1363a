// Mean and covariance of queries before RoPE, and the queries expected at later positions.
#include <kvlab/ops.hpp>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/page/paged.hpp"
#include "ops/page/row_kernels.hpp"
#include "ops/score/moments.hpp"

namespace kvlab::ops {
namespace {

struct Head {
  float *products, *mean, *count;

  Head(const Moments& m, int slot, std::int64_t head, int dim)
      : products(&m(slot, head, 0)), mean(products + std::int64_t{dim} * dim), count(mean + dim) {}
};

// cosine, sine [i, head_dim / 2] undo the rotation of a query at position first + i, and its attention_scale.
struct Angles {
  std::vector<float> cosine, sine;

  Angles(const RopeTable& rope, int first, int count) {
    const int half = rope.head_dim / 2;
    cosine.resize(std::size_t(count) * half), sine.resize(cosine.size());
    const float factor = 1.f / (rope.attention_scale * rope.attention_scale);
    for (int i = 0; i < count; ++i) {
      float *c = cosine.data() + std::size_t(i) * half, *s = sine.data() + std::size_t(i) * half;
      rope_angles(rope, -(first + i), c, s);
      for (int d = 0; d < half; ++d) c[d] *= factor, s[d] *= factor;
    }
  }
};

// Adds the queries [i, head_dim] of one head.
void add_head(const View<const float, 2>& queries, const Angles& angles, const Head& to) {
  const RowKernels& kernels = row_kernels();
  const int n = static_cast<int>(queries.extent[0]), dim = static_cast<int>(queries.extent[1]), half = dim / 2;
  std::vector<float> x(dim), shift, sum(dim), products(std::size_t(dim) * dim);
  for (int i = 0; i < n; ++i) {
    std::copy_n(&queries(i, 0), dim, x.data());
    kernels.rotate(x.data(), angles.cosine.data() + std::size_t(i) * half, angles.sine.data() + std::size_t(i) * half,
                   dim);
    if (i == 0) shift = x;
    for (int d = 0; d < dim; ++d) x[d] -= shift[d], sum[d] += x[d];
    for (int d = 0; d < dim; ++d) kernels.add_scaled(x.data(), dim, x[d], products.data() + std::size_t(d) * dim);
  }
  // The products of two sets together are the sum of both, plus the weighted products of the difference of their means.
  const float old = *to.count, fresh = static_cast<float>(n), both = old + fresh;
  std::vector<float> off(dim);
  for (int d = 0; d < dim; ++d) off[d] = shift[d] + sum[d] / fresh - to.mean[d];
  for (int d = 0; d < dim; ++d)
    for (int e = 0; e < dim; ++e)
      to.products[d * dim + e] +=
          products[d * dim + e] - sum[d] * sum[e] / fresh + off[d] * off[e] * (old * fresh / both);
  for (int d = 0; d < dim; ++d) to.mean[d] += off[d] * (fresh / both);
  *to.count = both;
}

void check_moments(const PagedKv& kv, const Moments& m, std::int64_t heads, const char* op) {
  if (m.extent[1] != heads || heads % kv.kv_heads || m.extent[2] != moment_floats(kv.head_dim) || m.stride[2] != 1)
    fail(Errc::internal, op, "got moments of another shape, wanted those of take_moments");
  if (!kv.rope_table.inv_freq || kv.rope_table.head_dim != kv.head_dim)
    fail(Errc::internal, op, "got no RoPE table, wanted the model's");
}

}  // namespace

void add_moments(const Tensor<4>& queries, const std::int32_t* seen, const PagedKv& kv, int first, Moments moments,
                 Stream s) {
  const char* op = "add_moments";
  check_kv(kv, op, s);
  if (queries.dtype != DType::f32)
    fail(Errc::unsupported, op, std::string("got queries of ") + name_of(queries.dtype) + ", wanted f32");
  const View<const float, 4> q = queries.f32();
  check_moments(kv, moments, q.extent[1], op);
  if (q.extent[0] < kv.rows || q.extent[3] != kv.head_dim || !seen)
    fail(Errc::internal, op, "got queries of another shape, wanted [row, query head, i, head_dim]");
  if (q.stride[3] != 1) fail(Errc::unsupported, op, "got strided queries, wanted head_dim contiguous");
  if (s.device() == Device::cuda) return on_cuda<add_moments>(queries, seen, kv, first, moments, s);
  for (int r = 0; r < kv.rows; ++r) {
    const int n = static_cast<int>(q.extent[2]), oldest = seen[r] - n, skip = std::clamp(first - oldest, 0, n);
    if (skip == n) continue;
    const Angles angles(kv.rope_table, oldest + skip, n - skip);
#pragma omp parallel for schedule(dynamic)
    for (std::int64_t h = 0; h < q.extent[1]; ++h) {
      View<const float, 2> of_head = q[r][h];
      of_head.data += skip * of_head.stride[0];
      of_head.extent[0] -= skip;
      add_head(of_head, angles, Head(moments, kv.slots[r], h, kv.head_dim));
    }
  }
}

void expected_query(const Moments& moments, const std::int32_t* seen, const PagedKv& kv, int horizon,
                    View<float, 3> mean, View<float, 4> covariance, Stream s) {
  const char* op = "expected_query";
  check_kv(kv, op, s);
  const std::int64_t heads = mean.extent[1];
  const int dim = kv.head_dim, half = dim / 2;
  check_moments(kv, moments, heads, op);
  if (mean.extent[0] < kv.rows || mean.extent[2] != dim || covariance.extent[0] < kv.rows ||
      covariance.extent[1] != heads || covariance.extent[2] != dim || covariance.extent[3] != dim || !seen)
    fail(Errc::internal, op, "got outputs of another shape, wanted [row, query head, head_dim] and its square");
  if (mean.stride[2] != 1 || covariance.stride[3] != 1)
    fail(Errc::unsupported, op, "got strided outputs, wanted head_dim contiguous");
  if (horizon < 1) fail(Errc::internal, op, "got a horizon of " + std::to_string(horizon) + ", wanted 1 or more");
  if (s.device() == Device::cuda) return on_cuda<expected_query>(moments, seen, kv, horizon, mean, covariance, s);
  for (int r = 0; r < kv.rows; ++r) {
    std::vector<float> cosine(half), sine(half);
    for (int i = 0; i < half; ++i) {
      const MeanTurn turn = mean_turn(kv.rope_table.inv_freq[i], seen[r], horizon);
      cosine[i] = static_cast<float>(turn.cosine) * kv.rope_table.attention_scale;
      sine[i] = static_cast<float>(turn.sine) * kv.rope_table.attention_scale;
    }
#pragma omp parallel for schedule(dynamic)
    for (std::int64_t h = 0; h < heads; ++h) {
      const Head from(moments, kv.slots[r], h, dim);
      const float divisor = 1.f / std::max(1.f, *from.count);
      std::copy_n(from.mean, dim, &mean(r, h, 0));
      row_kernels().rotate(&mean(r, h, 0), cosine.data(), sine.data(), dim);
      for (int d = 0; d < dim; ++d) {
        float* to = &covariance(r, h, d, 0);
        for (int e = 0; e < dim; ++e) to[e] = from.products[d * dim + e] * divisor;
        row_kernels().rotate(to, cosine.data(), sine.data(), dim);
      }
      for (int i = 0; i < half; ++i) {
        float *x = &covariance(r, h, i, 0), *y = &covariance(r, h, i + half, 0);
        for (int e = 0; e < dim; ++e) {
          const float a = x[e], b = y[e];
          x[e] = a * cosine[i] - b * sine[i];
          y[e] = b * cosine[i] + a * sine[i];
        }
      }
    }
  }
}

}  // namespace kvlab::ops
