// Rows of low rank, jointly over the KV heads: the nearest ones, and factors of them.
#include "ops/score/low_rank.hpp"

#include <kvlab/eigen.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "base/device_op.hpp"
#include "base/half.hpp"
#include "base/over_rows.hpp"
#include "base/per_thread.hpp"
#include "ops/page/check.hpp"
#include "ops/page/extents.hpp"
#include "ops/page/paged.hpp"
#include "ops/page/rope_cache.hpp"
#include "ops/page/row_kernels.hpp"
#include "ops/score/channels.hpp"
#include "ops/score/key_factors.hpp"

namespace kvlab::ops {
namespace {

using Numbers = std::vector<double>;

// X of one row of the batch.
struct Joint {
  const PagedKv& kv;
  View<float, 4> rows;
  int row, tokens = 0, width;

  Joint(const PagedKv& of, const View<const float, 4>& from, int r)
      : Joint(of, View<float, 4>{const_cast<float*>(from.data), from.extent, from.stride}, r) {}
  Joint(const PagedKv& of, const View<float, 4>& from, int r)
      : kv(of), rows(from), row(r), width(of.kv_heads * of.head_dim) {
    for (int h = 0; h < kv.kv_heads; ++h) tokens = std::max(tokens, kv.tokens(row, h));
  }
  void read(int t, double* out) const {
    for (int h = 0; h < kv.kv_heads; ++h)
      for (int d = 0; d < kv.head_dim; ++d) *out++ = t < kv.tokens(row, h) ? double{rows(row, h, t, d)} : 0;
  }
  template <class F>
  void write(int t, const F& f) const {
    for (int h = 0, i = 0; h < kv.kv_heads; ++h)
      for (int d = 0; d < kv.head_dim; ++d, ++i)
        if (t < kv.tokens(row, h)) rows(row, h, t, d) = static_cast<float>(f(rows(row, h, t, d), i));
  }
};

// g [width, width] = X^T X
void fill_products(const Joint& x, double* g) {
  const auto w = static_cast<std::size_t>(x.width);
  constexpr int at_once = 64;
  Numbers block(w * at_once);
  std::fill_n(g, w * w, 0.);
  for (int first = 0; first < x.tokens; first += at_once) {
    const int count = std::min(at_once, x.tokens - first);
    for (int t = 0; t < count; ++t) x.read(first + t, &block[static_cast<std::size_t>(t) * w]);
#pragma omp parallel for schedule(dynamic, 8) if (worth_threads(x.width * std::int64_t{x.width}))
    for (int i = 0; i < x.width; ++i)
      for (int t = 0; t < count; ++t) {
        const double* of = &block[static_cast<std::size_t>(t) * w];
        const double y = of[i];
        double* to = g + static_cast<std::size_t>(i) * w;
        for (int j = 0; j <= i; ++j) to[j] += y * of[j];
      }
  }
  for (std::size_t i = 0; i < w; ++i)
    for (std::size_t j = 0; j < i; ++j) g[j * w + i] = g[i * w + j];
}

// Eigenvectors [vector][element] of a symmetric matrix, and their values. Elements change independently of each other,
// so they lie side by side.
void eigenvectors(double* a, int n, double* z, double* values) {
  const auto w = static_cast<std::size_t>(n);
  Numbers v(w), p(w), beside(w), cosine(w), sine(w);
  std::fill_n(values, w, 0.);
  std::fill_n(z, w * w, 0.);
  for (std::size_t i = 0; i < w; ++i) z[i * w + i] = 1;
  const auto row = [&](double* x, int i) { return x + static_cast<std::size_t>(i) * w; };
  for (int k = 0; k < n; ++k) {
    values[k] = row(a, k)[k];
    if (k + 1 == n) break;
    double tail = 0;
    for (int j = k + 2; j < n; ++j) tail += row(a, k)[j] * row(a, k)[j];
    const Reflection r = Reflection::of(row(a, k)[k + 1], tail);
    beside[static_cast<std::size_t>(k)] = r.first;
    if (r.beta == 0) continue;
    std::copy(row(a, k) + k + 1, row(a, k) + n, &v[static_cast<std::size_t>(k) + 1]);
    v[static_cast<std::size_t>(k) + 1] = r.v0;
    const double* of = v.data();
    std::fill(p.begin(), p.end(), 0);
    for (int j = k + 1; j < n; ++j) {
      const double* from = row(a, j);
      for (int i = k + 1; i < n; ++i) p[static_cast<std::size_t>(i)] += from[i] * of[j];
    }
    double product = 0;
    for (int i = k + 1; i < n; ++i) product += (p[static_cast<std::size_t>(i)] *= r.beta) * of[i];
    for (int i = k + 1; i < n; ++i) p[static_cast<std::size_t>(i)] -= r.beta / 2 * product * of[i];
    const double* by = p.data();
#pragma omp parallel for schedule(static) if (worth_threads(std::int64_t{n - k} * (n - k)))
    for (int j = k + 1; j < n; ++j) {
      double* to = row(a, j);
      for (int i = k + 1; i < n; ++i) to[i] -= of[j] * by[i] + by[j] * of[i];
    }
    std::fill(cosine.begin(), cosine.end(), 0);
    for (int j = k + 1; j < n; ++j) {
      const double* from = row(z, j);
      const double y = r.beta * of[j];
      for (int i = 0; i < n; ++i) cosine[static_cast<std::size_t>(i)] += y * from[i];
    }
#pragma omp parallel for schedule(static) if (worth_threads(std::int64_t{n} * (n - k)))
    for (int j = k + 1; j < n; ++j) {
      double* to = row(z, j);
      for (int i = 0; i < n; ++i) to[i] -= of[j] * cosine[static_cast<std::size_t>(i)];
    }
  }
  QlSteps steps{values, beside.data(), cosine.data(), sine.data(), n};
  while (steps.next()) {
    constexpr int at_once = 512;
#pragma omp parallel for schedule(static) if (worth_threads(std::int64_t{n} * (steps.last - steps.first)))
    for (int begin = 0; begin < n; begin += at_once) {
      const int end = std::min(n, begin + at_once);
      for (int k = steps.last; k >= steps.first; --k) {
        const double c = steps.cosine[k], s = steps.sine[k];
        double *x = row(z, k), *y = row(z, k + 1);
        for (int i = begin; i < end; ++i) {
          const double f = y[i];
          y[i] = s * x[i] + c * f;
          x[i] = c * x[i] - s * f;
        }
      }
    }
  }
}

// Indices of the values, the greatest first.
std::vector<int> falling(const double* values, int n) {
  std::vector<int> order(static_cast<std::size_t>(n));
  for (int i = 0; i < n; ++i) order[static_cast<std::size_t>(i)] = i;
  std::sort(order.begin(), order.end(), [&](int i, int j) { return is_greater(values[i], i, values[j], j); });
  return order;
}

// What `numbers` holds of a layer, as on a GPU.
double& energy_of(const RankDirections& d, int layer) { return (&d.numbers(4, 0, 0))[layer]; }
std::int32_t* order_of(const RankDirections& d, int layer) {
  return reinterpret_cast<std::int32_t*>(&d.numbers(5, 0, 0)) + layer * d.vectors.extent[2];
}

void make_directions(const RankDirections& d, int layer) {
  const auto n = static_cast<int>(d.vectors.extent[2]);
  const auto w = static_cast<std::size_t>(n);
  double *a = &d.products(layer, 0, 0), *values = &d.numbers(3, layer, 0);
  double energy = 0;
  for (std::size_t i = 0; i < w; ++i) energy += a[i * w + i];
  energy_of(d, layer) = energy;
  if (energy == 0 || !std::isfinite(energy)) return;
  for (std::size_t i = 0; i < w * w; ++i) a[i] /= energy;
  eigenvectors(a, n, &d.vectors(layer, 0, 0), values);
  const std::vector<int> order = falling(values, n);
  std::copy(order.begin(), order.end(), order_of(d, layer));
}

void project(const Joint& x, const RankDirections& d, int layer, int rank) {
  const auto w = static_cast<std::size_t>(x.width);
  const double energy = energy_of(d, layer);
  if (energy == 0) return;
  if (!std::isfinite(energy)) {
    for (int t = 0; t < x.tokens; ++t) x.write(t, [](float, int) { return NAN; });
    return;
  }
  const double* z = &d.vectors(layer, 0, 0);
  const RankSide side = RankSide::of(rank, x.width);
  const std::int32_t* order = order_of(d, layer) + side.first;
  const auto count = static_cast<std::size_t>(side.count);
  Numbers vectors(count * w), turned(count * w);  // [vector][element], [element][vector]
  for (std::size_t q = 0; q < count; ++q)
    for (std::size_t i = 0; i < w; ++i)
      turned[i * count + q] = vectors[q * w + i] = z[static_cast<std::size_t>(order[q]) * w + i];
  PerThread<double> room(2 * w + count);
#pragma omp parallel if (worth_threads(std::int64_t{x.tokens} * x.width))
  {
    const auto of = room.own().first(w), sum = room.own().subspan(w, w), along = room.own().last(count);
#pragma omp for schedule(static)
    for (int t = 0; t < x.tokens; ++t) {
      x.read(t, of.data());
      std::fill(along.begin(), along.end(), 0);
      std::fill(sum.begin(), sum.end(), 0);
      for (std::size_t i = 0; i < w; ++i)
        for (std::size_t q = 0; q < count; ++q) along[q] += of[i] * turned[i * count + q];
      for (std::size_t q = 0; q < count; ++q)
        for (std::size_t i = 0; i < w; ++i) sum[i] += along[q] * vectors[q * w + i];
      x.write(t, [&](float own, int i) {
        const double y = sum[static_cast<std::size_t>(i)];
        return side.takes_away ? double{own} - y : y;
      });
    }
  }
}

// Element i of numbers of a dtype.
double number_at(const std::byte* row, DType dtype, std::int64_t i) {
  float x;
  if (dtype == DType::f32) {
    std::memcpy(&x, row + 4 * i, 4);
    return x;
  }
  bf16 half;
  std::memcpy(&half.bits, row + 2 * i, 2);
  return dtype == DType::f16 ? half_to_float(half.bits) : static_cast<float>(half);
}
void put_number(std::byte* row, DType dtype, std::int64_t i, double number) {
  const auto x = static_cast<float>(number);
  if (dtype == DType::f32) {
    std::memcpy(row + 4 * i, &x, 4);
    return;
  }
  const std::uint16_t bits = dtype == DType::f16 ? float_to_half(x) : bf16(x).bits;
  std::memcpy(row + 2 * i, &bits, 2);
}

std::byte* token_at(const KeyFactors& f, int slot, int place) {
  return f.tokens + slot * f.slot_bytes + place * f.row * static_cast<std::int64_t>(size_of(f.dtype));
}

void factor(const Joint& x, const RankDirections& d, int layer, const KeyFactors& f) {
  const auto w = static_cast<std::size_t>(x.width), count = static_cast<std::size_t>(f.rank);
  const int slot = x.kv.slots[x.row];
  const double energy = energy_of(d, layer);
  const double* z = &d.vectors(layer, 0, 0);
  const std::int32_t* order = order_of(d, layer);
  const bool some = energy > 0 && std::isfinite(energy);
  Numbers turned(w * count);  // [element][vector]
  std::byte* basis = f.basis + slot * f.slot_bytes;
  for (std::size_t q = 0; q < count; ++q)
    for (std::size_t i = 0; i < w; ++i) {
      const double y = some ? z[static_cast<std::size_t>(order[q]) * w + i] : 0;
      turned[i * count + q] = y;
      put_number(basis, f.dtype, static_cast<std::int64_t>(q * w + i), y);
    }
  PerThread<double> room(w + count);
#pragma omp parallel if (worth_threads(std::int64_t{x.tokens} * x.width))
  {
    const auto of = room.own().first(w), along = room.own().last(count);
#pragma omp for schedule(static)
    for (int t = 0; t < x.tokens; ++t) {
      x.read(t, of.data());
      std::fill(along.begin(), along.end(), energy == 0 || some ? 0. : double{NAN});
      for (std::size_t i = 0; some && i < w; ++i)
        for (std::size_t q = 0; q < count; ++q) along[q] += of[i] * turned[i * count + q];
      for (std::size_t q = 0; q < count; ++q)
        put_number(token_at(f, slot, t), f.dtype, static_cast<std::int64_t>(q), along[q]);
    }
  }
  f.count_of(slot) = x.tokens;
}

void mark_whole(const PagedKv& kv, const TokenList& exact, const KeyFactors& f) {
  const int slot = kv.slots[0];
  for (int h = 0; h < kv.kv_heads; ++h) {
    std::uint8_t* whole = f.whole_of(slot, h);
    std::fill_n(whole, f.pages, std::uint8_t{0});
    for (int i = 0; i < exact.count(exact.at(0), h); ++i) whole[exact.index(exact.at(0), h, i) / kv.page_size] = 1;
  }
}

void check_directions(const RankDirections& d, const char* op) {
  const std::int64_t layers = d.vectors.extent[0], w = d.vectors.extent[2];
  if (d.vectors.extent[1] != w || d.products.extent != d.vectors.extent || d.numbers.extent[0] != 6 ||
      d.numbers.extent[1] != layers || d.numbers.extent[2] != w || d.vectors.stride[1] != w ||
      d.products.stride[1] != w)
    fail(Errc::internal, op,
         "got directions " + extents(d.vectors) + " of matrices " + extents(d.products) + " and numbers " +
             extents(d.numbers) + ", wanted those of RankDirections::in");
}

void check_factors(const PagedKv& kv, const KeyFactors& f, const char* op, Stream s) {
  if (!f || f.rank < 1 || f.row < f.rank || f.kv_heads != kv.kv_heads || f.rank > kv.kv_heads * kv.head_dim ||
      f.pages < kv.table.extent[2] || (s.device() == Device::cpu && f.places < longest(kv)))
    fail(Errc::internal, op,
         "got factors of rank " + std::to_string(f.rank) + " for " + std::to_string(f.kv_heads) + " KV heads and " +
             std::to_string(f.places) + " tokens, wanted those of KeptKeyFactors for this cache");
}

void check_layer(const PagedKv& kv, const RankDirections& d, int layer, const char* op) {
  const int width = kv.kv_heads * kv.head_dim;
  if (kv.rows != 1 || d.vectors.extent[2] != width || layer < 0 || layer >= d.vectors.extent[0])
    fail(Errc::internal, op,
         "got layer " + std::to_string(layer) + " of directions " + extents(d.vectors) + " for " +
             std::to_string(kv.rows) + " rows of " + std::to_string(width) + " elements, wanted one row and its layer");
}

}  // namespace

void rebuild_keys(const KeyFactors& f, int slot, int head, int first, int count, const std::int32_t* positions,
                  const RopeTable& rope, float* out, std::int64_t stride) {
  const int dim = rope.head_dim;
  const std::int64_t width = std::int64_t{f.kv_heads} * dim;
  const std::byte* basis = f.basis + slot * f.slot_bytes;
  float of[most_head_dim];
  for (int t = 0; t < count; ++t) std::fill_n(out + t * stride, dim, 0.f);
  for (int q = 0; q < f.rank; ++q) {
    for (int d = 0; d < dim; ++d) of[d] = static_cast<float>(number_at(basis, f.dtype, q * width + head * dim + d));
    for (int t = 0; t < count; ++t) {
      const auto x = static_cast<float>(number_at(token_at(f, slot, first + t), f.dtype, q));
      float* to = out + t * stride;
      for (int d = 0; d < dim; ++d) to[d] += x * of[d];
    }
  }
  const auto angles = rope_rows(rope, *std::max_element(positions, positions + count) + 1);
  for (int t = 0; t < count; ++t)
    row_kernels().rotate(out + t * stride, angles->cosine_of(positions[t]), angles->sine_of(positions[t]), dim);
}

void row_products(const PagedKv& kv, View<const float, 4> rows, const RankDirections& directions, int layer, Stream s) {
  const char* op = "row_products";
  check_kv(kv, op, s);
  check_rows(kv, rows, op, s);
  check_directions(directions, op);
  check_layer(kv, directions, layer, op);
  if (s.device() == Device::cuda) return on_cuda<row_products>(kv, rows, directions, layer, s);
  fill_products(Joint(kv, rows, 0), &directions.products(layer, 0, 0));
}

void rank_directions(const RankDirections& directions, Stream s) {
  check_directions(directions, "rank_directions");
  if (s.device() == Device::cuda) return on_cuda<rank_directions>(directions, s);
#pragma omp parallel for schedule(dynamic)
  for (std::int64_t layer = 0; layer < directions.vectors.extent[0]; ++layer)
    make_directions(directions, static_cast<int>(layer));
}

void factor_rows(const PagedKv& kv, const RankDirections& directions, int layer, View<const float, 4> rows,
                 const TokenList& exact, const KeyFactors& factors, Stream s) {
  const char* op = "factor_rows";
  check_kv(kv, op, s);
  check_rows(kv, rows, op, s);
  check_directions(directions, op);
  check_layer(kv, directions, layer, op);
  check_factors(kv, factors, op, s);
  check_list(kv, exact, op);
  if (s.device() == Device::cuda) return on_cuda<factor_rows>(kv, directions, layer, rows, exact, factors, s);
  factor(Joint(kv, rows, 0), directions, layer, factors);
  mark_whole(kv, exact, factors);
}

void rebuild_rows(const PagedKv& kv, const KeyFactors& factors, View<float, 4> rows, Stream s) {
  const char* op = "rebuild_rows";
  resident_cache(&kv, op, s);
  check_rows(kv, rows, op, s);
  check_factors(kv, factors, op, s);
  if (kv.rope != RopeRegime::original)
    fail(Errc::unsupported, op, "got keys that RoPE turns by ranks, wanted the regime original: by text positions");
  if (!kv.rope_table.inv_freq || kv.rope_table.head_dim != kv.head_dim)
    fail(Errc::internal, op, "got no RoPE table, wanted the model's");
  if (s.device() == Device::cuda) return on_cuda<rebuild_rows>(kv, factors, rows, s);
  over_rows(std::int64_t{kv.rows} * kv.kv_heads, [&](std::int64_t i) {
    const int r = static_cast<int>(i) / kv.kv_heads, h = static_cast<int>(i) % kv.kv_heads;
    const int slot = kv.slots[r], n = std::min(factors.count_of(slot), kv.tokens(r, h));
    if (n == 0) return;
    std::vector<std::int32_t> positions(static_cast<std::size_t>(n));
    token_positions(kv, r, h, n, positions.data());
    for (int t = 0; t < n; t += rebuilt_at_once)
      rebuild_keys(factors, slot, h, t, std::min(rebuilt_at_once, n - t), positions.data() + t, kv.rope_table,
                   &rows(r, h, t, 0), rows.stride[2]);
  });
}

void low_rank(const PagedKv& kv, int rank, View<float, 4> rows, Stream s) {
  const char* op = "low_rank";
  check_kv(kv, op, s);
  check_rows(kv, rows, op, s);
  const int width = kv.kv_heads * kv.head_dim;
  if (rank < 1 || rank > width)
    fail(Errc::internal, op,
         "got rank " + std::to_string(rank) + ", wanted 1 to " + std::to_string(width) + ", KV heads times head_dim");
  if (rank == width) return;
  if (s.device() == Device::cuda) return on_cuda<low_rank>(kv, rank, rows, s);
  Numbers memory(RankDirections::bytes(1, width) / sizeof(double));
  const RankDirections one = RankDirections::in(memory.data(), 1, width);
  for (int r = 0; r < kv.rows; ++r) {
    fill_products(Joint(kv, rows, r), memory.data());
    make_directions(one, 0);
    project(Joint(kv, rows, r), one, 0, rank);
  }
}

}  // namespace kvlab::ops

namespace kvlab {

Eigen eigen_of_symmetric(std::vector<double> matrix, int n) {
  const auto w = static_cast<std::size_t>(std::max(n, 0));
  if (n < 1 || matrix.size() != w * w)
    ops::fail(Errc::internal, "eigen_of_symmetric",
              "got " + std::to_string(matrix.size()) + " numbers, wanted those of a matrix of " + std::to_string(n) +
                  " x " + std::to_string(n));
  std::vector<double> values(w), z(w * w);
  ops::eigenvectors(matrix.data(), n, z.data(), values.data());
  Eigen out;
  for (const int i : ops::falling(values.data(), n)) {
    out.values.push_back(values[static_cast<std::size_t>(i)]);
    const auto first = z.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(i) * w);
    out.vectors.insert(out.vectors.end(), first, first + n);
  }
  return out;
}

}  // namespace kvlab
