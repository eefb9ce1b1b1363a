// Rows of low rank, of ragged heads.
#include <fmt/format.h>

#include <limits>

#include "cases/on_caches.hpp"
#include "ops/score/low_rank.hpp"

namespace kvlab::cases {
namespace {

void check_low_rank(OnCache& x) {
  const std::int64_t rows = x.c.rows(), heads = x.c.kv_heads(), room = x.c.room(), dim = x.kv.head_dim;
  const int width = static_cast<int>(heads * dim);
  if (width > 160) return;  // the reference is slow
  Numbers<4> keys(x, {rows, heads, room, dim});
  // Every second cache has rows along few directions, and some noise.
  const std::vector<float> along = x.c.normal(3 * heads * dim);
  for (std::int64_t r = 0; x.n % 2 && r < rows; ++r)
    for (std::int64_t t = 0; t < room; ++t) {
      const std::vector<float> of = x.c.normal(3);
      for (std::int64_t h = 0; h < heads; ++h)
        for (std::int64_t d = 0; d < dim; ++d) {
          float sum = .01f * keys.own()(r, h, t, d);
          for (std::int64_t q = 0; q < 3; ++q)
            sum += of[static_cast<std::size_t>(q)] * along[static_cast<std::size_t>((q * heads + h) * dim + d)];
          keys.own()(r, h, t, d) = sum;
        }
    }
  for (const int rank : {1, 3, width / 2 + 1, width - 1, width})
    x.same<4>(
        fmt::format("low_rank of rank {}", rank), keys.own(), 1e-5,
        [&](View<float, 4> out) { ops::low_rank(x.there, rank, out, x.stream()); },
        [&](View<float, 4> out) { ops::low_rank_reference(x.kv, rank, out); });
  for (const float special : {0.f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    for (std::int64_t t = 0; t < room; ++t)
      for (std::int64_t h = 0; h < heads; ++h)
        for (std::int64_t d = 0; d < dim; ++d) keys.own()(0, h, t, d) = 0;
    for (std::int64_t h = 0; h < heads; ++h) keys.own()(0, h, 0, 1) = special;
    x.same<4>(
        fmt::format("low_rank of a row with {}", special), keys.own(), 1e-5,
        [&](View<float, 4> out) { ops::low_rank(x.there, 2, out, x.stream()); },
        [&](View<float, 4> out) {
          ops::low_rank_reference(x.kv, 2, out);
          for (int h = 0; special != 0 && h < x.kv.kv_heads; ++h)
            for (int t = 0; t < x.kv.tokens(0, h); ++t)
              for (std::int64_t d = 0; d < dim; ++d) out(0, h, t, d) = std::numeric_limits<float>::quiet_NaN();
        });
  }
}

std::vector<Case> list() { return {on_caches("low_rank", "of ragged heads", 30, check_low_rank)}; }

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
