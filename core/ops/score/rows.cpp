// Cached keys or values as f32 rows, and their products with vectors and matrices.
#include <kvlab/ops.hpp>
#include <kvlab/rewrite.hpp>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/page/token_rows.hpp"
#include "ops/score/rows.hpp"

namespace kvlab::ops {
namespace {

constexpr int block_tokens = 128;  // tokens decoded at once

// Calls visit(place, rows, count) for runs of a head's decoded rows, in order: of all its pages, of listed ones, or of
// those that the places [begin, end) are in. Keys are as attention reads them.
template <class Visit>
void for_rows(const KvRows& rows, int row, int head, const HeadRanks& ranks, const Visit& visit,
              const PageList* listed = nullptr, int begin = 0, int end = -1) {
  thread_local TokenRows tokens;
  const PagedKv& kv = *rows.kv;
  const int pages = listed    ? listed->count(listed->at(row), head)
                    : end < 0 ? kv.pages(row, head)
                              : (end + kv.page_size - 1) / kv.page_size;
  const int block = listed ? 1 : std::max(1, block_tokens / kv.page_size);
  const std::int32_t* rank = rows.side == KvSide::key ? ranks.of(row, head) : nullptr;
  for (int p = begin / kv.page_size; p < pages; p += block) {
    const int first = listed ? listed->index(listed->at(row), head, p) : p;
    tokens.gather(kv, row, head, rows.side, nullptr, first, std::min(block, pages - p));
    const float* x = rank ? tokens.rotate(kv, rank, *ranks.rope()) : tokens.decode(kv.head_dim);
    visit(first * kv.page_size, x, tokens.count());
  }
}

void check_listed(const PagedKv& kv, const PageList& pages, const char* op) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      for (int i = 0; i < pages.count(pages.at(r), h); ++i) {
        const int page = pages.index(pages.at(r), h, i);
        if (page < 0 || page >= kv.pages(r, h))
          fail(Errc::internal, op,
               "got page " + std::to_string(page) + " in a list, wanted one of " + std::to_string(kv.pages(r, h)));
        check_page(kv, r, h, page, op);
      }
}

float norm(const float* x, int dim) {
  float sum;
  row_kernels().square_sum({x, nullptr, dim * 4, 1, RowKind::f32}, dim, &sum);
  return std::sqrt(sum);
}

void check_vectors(const PagedKv& kv, const View<const float, 3>& vectors, std::int64_t heads, const char* op) {
  if (vectors.extent[0] < kv.rows || vectors.extent[1] != heads || vectors.extent[2] != kv.head_dim)
    fail(Errc::internal, op, "got vectors of another shape, wanted [row, head, head_dim] with the heads of the output");
  if (vectors.stride[2] != 1) fail(Errc::unsupported, op, "got strided vectors, wanted head_dim contiguous");
}

HeadRanks& ranks_of(const PagedKv& kv) {
  thread_local HeadRanks ranks;
  ranks.fill(kv);
  return ranks;
}

// Rounds each of `count` rows to codes of so many bits.
void round_rows(const float* x, int count, int dim, int bits, std::vector<float>& out) {
  out.resize(std::size_t(count) * dim);
  for (int t = 0; t < count; ++t, x += dim) {
    float least = INFINITY, greatest = -INFINITY;
    for (int d = 0; d < dim; ++d) least = std::fmin(least, x[d]), greatest = std::fmax(greatest, x[d]);
    for (int d = 0; d < dim; ++d) out[std::size_t(t) * dim + d] = rounded_to_code(x[d], least, greatest, bits);
  }
}

void dot_head(const KvRows& rows, int row, int head, const View<const float, 3>& vectors, const RowProduct& how,
              const HeadRanks& ranks, const Scores& out) {
  const RowKernels& kernels = row_kernels();
  const int dim = rows.kv->head_dim, group = static_cast<int>(vectors.extent[1]) / rows.kv->kv_heads;
  thread_local std::vector<float> panel, dots, length, rounded;
  panel.resize(std::size_t(dim) * panel_width);
  dots.resize(std::size_t(group) * panel_width);
  length.resize(group);
  for (int g = 0; g < group; ++g) length[g] = norm(&vectors(row, head * group + g, 0), dim);
  for (int g = 0; how.pages && g < group; ++g)
    std::fill_n(&out(row, head * group + g, 0), rows.kv->tokens(row, head), -INFINITY);
  const auto visit = [&](int place, const float* x, int count) {
    if (how.bits > 0) {
      round_rows(x, count, dim, how.bits, rounded);
      x = rounded.data();
    }
    for (int t = 0; t < count; t += panel_width) {
      const int n = std::min(panel_width, count - t);
      kernels.pack_panel(x + std::int64_t{t} * dim, n, dim, panel.data());
      kernels.panel_dot(panel.data(), dim, &vectors(row, head * group, 0), vectors.stride[1], group, dots.data(),
                        panel_width);
      for (int i = 0; i < n; ++i) {
        const float own = how.cosine ? norm(x + std::int64_t{t + i} * dim, dim) : 1;
        for (int g = 0; g < group; ++g) {
          const float by = how.cosine ? own * length[g] : 1;
          out(row, head * group + g, place + t + i) = by > 0 ? dots[g * panel_width + i] / by : 0;
        }
      }
    }
  };
  for_rows(rows, row, head, ranks, visit, how.pages);
}

// Multiplies a panel of rows by the matrix, then takes the dot product of each result with its row.
void quadratic_head(const KvRows& rows, int row, int head, const View<const float, 4>& matrix, const HeadRanks& ranks,
                    const Scores& out) {
  const RowKernels& kernels = row_kernels();
  const int dim = rows.kv->head_dim, group = static_cast<int>(matrix.extent[1]) / rows.kv->kv_heads;
  thread_local std::vector<float> panel, product;
  panel.resize(std::size_t(dim) * panel_width);
  product.resize(std::size_t(dim) * panel_width);
  for_rows(rows, row, head, ranks, [&](int place, const float* x, int count) {
    for (int t = 0; t < count; t += panel_width) {
      const int n = std::min(panel_width, count - t);
      kernels.pack_panel(x + std::int64_t{t} * dim, n, dim, panel.data());
      for (int g = 0; g < group; ++g) {
        kernels.panel_dot(panel.data(), dim, &matrix(row, head * group + g, 0, 0), matrix.stride[2], dim,
                          product.data(), panel_width);
        float sums[panel_width] = {};
        for (int d = 0; d < dim; ++d)
          for (int i = 0; i < panel_width; ++i) sums[i] += product[d * panel_width + i] * panel[d * panel_width + i];
        std::copy_n(sums, n, &out(row, head * group + g, place + t));
      }
    }
  });
}

}  // namespace

void read_rows(const KvRows& rows, View<float, 4> out, Stream s) {
  const char* op = "read_rows";
  const PagedKv& kv = resident_cache(rows.kv, op, s);
  if (out.extent[0] < kv.rows || out.extent[1] != kv.kv_heads || out.extent[3] != kv.head_dim ||
      (s.device() == Device::cpu && out.extent[2] < longest(kv)))
    fail(Errc::internal, op, "got an output of another shape, wanted [row, kv_head, token, head_dim]");
  if (out.stride[3] != 1) fail(Errc::unsupported, op, "got a strided output, wanted head_dim contiguous");
  if (s.device() == Device::cuda) return on_cuda<read_rows>(rows, out, s);
  const HeadRanks& ranks = ranks_of(kv);
#pragma omp parallel for collapse(2) schedule(dynamic) if (worth_threads(kv.rows * kv.kv_heads * longest(kv)))
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      for_rows(rows, r, h, ranks, [&](int place, const float* x, int count) {
        for (int t = 0; t < count; ++t)
          std::copy_n(x + std::int64_t{t} * kv.head_dim, kv.head_dim, &out(r, h, place + t, 0));
      });
}

void read_range(const KvRows& rows, const TokenRange& range, View<float, 4> out, Stream s) {
  const char* op = "read_range";
  if (!rows.kv) fail(Errc::internal, op, "got no cache, wanted a layer's");
  const PagedKv& kv = *rows.kv;
  check_kv(kv, op, s);
  if (out.extent[0] < kv.rows || out.extent[1] != kv.kv_heads || out.extent[3] != kv.head_dim || out.stride[3] != 1)
    fail(Errc::internal, op,
         "got an output of another shape, wanted [row, kv_head, i, head_dim] with head_dim contiguous");
  for (const auto& numbers : {range.first, range.count})
    if (!numbers || numbers.extent[0] < kv.rows || numbers.extent[1] < kv.kv_heads)
      fail(Errc::internal, op, "got no range or one of fewer rows or heads, wanted [row, kv_head]");
  if (s.device() == Device::cuda) return on_cuda<read_range>(rows, range, out, s);
  std::int64_t tokens = 0;
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int n = kv.tokens(r, h), begin = range.begin(r, h, n), end = range.end(r, h, n);
      if (!range.fits(r, h, n) || end - begin > out.extent[2])
        fail(Errc::internal, op,
             "got " + std::to_string(range.count(r, h)) + " tokens from place " + std::to_string(range.first(r, h)) +
                 ", wanted places below " + std::to_string(n) + " and at most " + std::to_string(out.extent[2]) +
                 ", the output's room");
      for (int p = begin / kv.page_size; p * kv.page_size < end && begin < end; ++p) check_page(kv, r, h, p, op);
      tokens += end - begin;
    }
  const HeadRanks& ranks = ranks_of(kv);
#pragma omp parallel for collapse(2) schedule(dynamic) if (worth_threads(tokens))
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int n = kv.tokens(r, h), begin = range.begin(r, h, n), end = range.end(r, h, n);
      if (begin == end) continue;
      const auto copy = [&](int place, const float* x, int count) {
        for (int t = std::max(begin - place, 0); t < std::min(count, end - place); ++t)
          std::copy_n(x + std::int64_t{t} * kv.head_dim, kv.head_dim, &out(r, h, place + t - begin, 0));
      };
      for_rows(rows, r, h, ranks, copy, nullptr, begin, end);
    }
}

void row_product(const KvRows& rows, View<const float, 3> vectors, const RowProduct& how, Scores out, Stream s) {
  const char* op = how.pages ? "listed_row_dot" : how.cosine ? "row_cosine" : "row_dot";
  const bool listed = how.pages && rows.kv;  // its pages alone are checked, below
  if (listed) check_kv(*rows.kv, op, s);
  const PagedKv& kv = listed ? *rows.kv : resident_cache(rows.kv, op, s);
  check_scores(kv, out, "out", op, s);
  check_vectors(kv, vectors, out.extent[1], op);
  if (how.bits < 0 || how.bits > 8)
    fail(Errc::internal, op, "got codes of " + std::to_string(how.bits) + " bits, wanted 0 to 8");
  if (how.pages) check_list(kv, *how.pages, op);
  if (how.pages) run_put_off();  // it may write the list
  if (s.device() == Device::cuda) return on_cuda<row_product>(rows, vectors, how, out, s);
  if (how.pages) check_listed(kv, *how.pages, op);
  const HeadRanks& ranks = ranks_of(kv);
#pragma omp parallel for collapse(2) schedule(dynamic) if (worth_threads(kv.rows * out.extent[1] * longest(kv)))
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) dot_head(rows, r, h, vectors, how, ranks, out);
}

void row_dot(const KvRows& rows, View<const float, 3> vectors, Scores out, Stream s) {
  row_product(rows, vectors, {}, out, s);
}

void row_cosine(const KvRows& rows, View<const float, 3> vectors, Scores out, Stream s) {
  row_product(rows, vectors, {.cosine = true}, out, s);
}

void listed_row_dot(const KvRows& rows, View<const float, 3> vectors, const PageList& pages, int bits, Scores out,
                    Stream s) {
  row_product(rows, vectors, {.pages = &pages, .bits = bits}, out, s);
}

void row_quadratic(const KvRows& rows, View<const float, 4> matrix, Scores out, Stream s) {
  const char* op = "row_quadratic";
  const PagedKv& kv = resident_cache(rows.kv, op, s);
  check_scores(kv, out, "out", op, s);
  if (matrix.extent[0] < kv.rows || matrix.extent[1] != out.extent[1] || matrix.extent[2] != kv.head_dim ||
      matrix.extent[3] != kv.head_dim)
    fail(Errc::internal, op,
         "got matrices of another shape, wanted [row, head, head_dim, head_dim] with the heads of "
         "the output");
  if (matrix.stride[3] != 1) fail(Errc::unsupported, op, "got strided matrices, wanted their rows contiguous");
  if (s.device() == Device::cuda) return on_cuda<row_quadratic>(rows, matrix, out, s);
  const HeadRanks& ranks = ranks_of(kv);
#pragma omp parallel for collapse(2) schedule(dynamic) if (worth_threads(kv.rows * out.extent[1] * longest(kv)))
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) quadratic_head(rows, r, h, matrix, ranks, out);
}

void normalised_mean(const KvRows& rows, View<float, 3> out, Stream s) {
  const char* op = "normalised_mean";
  const PagedKv& kv = resident_cache(rows.kv, op, s);
  if (out.extent[0] < kv.rows || out.extent[1] != kv.kv_heads || out.extent[2] != kv.head_dim)
    fail(Errc::internal, op, "got an output of another shape, wanted [row, kv_head, head_dim]");
  if (out.stride[2] != 1) fail(Errc::unsupported, op, "got a strided output, wanted head_dim contiguous");
  if (s.device() == Device::cuda) return on_cuda<normalised_mean>(rows, out, s);
  const HeadRanks& ranks = ranks_of(kv);
#pragma omp parallel for collapse(2) schedule(dynamic) if (worth_threads(kv.rows * kv.kv_heads * longest(kv)))
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      thread_local std::vector<float> sum;
      thread_local std::vector<double> total;
      total.assign(kv.head_dim, 0);
      for_rows(rows, r, h, ranks, [&](int, const float* x, int count) {
        sum.assign(kv.head_dim, 0);
        for (int t = 0; t < count; ++t, x += kv.head_dim)
          if (const float length = norm(x, kv.head_dim); length > 0)
            row_kernels().add_scaled(x, kv.head_dim, 1.f / length, sum.data());
        for (int d = 0; d < kv.head_dim; ++d) total[d] += sum[d];
      });
      for (int d = 0; d < kv.head_dim; ++d) out(r, h, d) = static_cast<float>(total[d] / std::max(1, kv.tokens(r, h)));
    }
}

}  // namespace kvlab::ops
