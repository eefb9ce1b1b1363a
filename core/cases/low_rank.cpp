// Rows of low rank, of ragged heads.
#include <fmt/format.h>

#include <cmath>
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

// The rows of a batch as those of layers.
void check_parts(OnCache& x) {
  const std::int64_t rows = x.c.rows(), heads = x.c.kv_heads(), room = x.c.room(), dim = x.kv.head_dim;
  const std::int64_t width = heads * dim;
  if (width > 160) return;
  Numbers<4> keys(x, {rows, heads, room, dim});
  if (x.n % 3 == 0) std::fill_n(&keys.own()(0, 0, 0, 0), heads * room * dim, 0.f);
  auto* memory = x.place.put(std::vector<std::byte>(RankDirections::bytes(rows, width), std::byte{0xff}));
  const RankDirections d = RankDirections::in(memory, rows, width);
  const auto of_row = [](const PagedKv& kv, std::int64_t r) {
    PagedKv one = kv;
    one.slots += r, one.rows = 1;
    return one;
  };
  const auto rows_of = [](View<float, 4> all, std::int64_t r) {
    all.data += r * all.stride[0], all.extent[0] = 1;
    return all;
  };
  for (const int rank : {1, static_cast<int>(width) / 2 + 1, static_cast<int>(width)})
    x.same<4>(
        fmt::format("three parts of rank {}", rank), keys.own(), 1e-5,
        [&](View<float, 4> out) {
          for (std::int64_t r = 0; r < rows; ++r)
            ops::row_products(of_row(x.there, r), rows_of(out, r), d, static_cast<int>(r), x.stream());
          ops::rank_directions(d, rank, x.stream());
          for (std::int64_t r = rows - 1; r >= 0; --r)
            ops::project_rows(of_row(x.there, r), d, static_cast<int>(r), rank, rows_of(out, r), x.stream());
        },
        [&](View<float, 4> out) { ops::low_rank_reference(x.kv, rank, out); });
}

// A prompt of Llama 3.1 8B's shape: one layer, and the vectors of all layers.
struct Timed final : Scene {
  Place& place;
  PagedFixture cache;
  int layers, rank = 160;
  PagedKv kv;
  View<float, 4> rows;
  RankDirections d;

  Timed(Place& at, int tokens, int of_layers)
      : place(at), cache({1, 8, 128, 32, (tokens + 31) / 32}), layers(of_layers) {
    for (int h = 0; h < 8; ++h) cache.fill_pooled(0, h, tokens, [](int t) { return t; });
    kv = place.put(cache.view(), cache.arena_bytes());
    rows = View<float, 4>::dense(place.put(normals(std::int64_t{8} * tokens * 128, 7)), {1, 8, tokens, 128});
    d = RankDirections::in(place.take<double>(RankDirections::bytes(layers, 1024) / 8), layers, 1024);
  }
  void run(int) override {
    for (int l = 0; l < layers; ++l) ops::row_products(kv, rows, d, l, place.stream());
    ops::rank_directions(d, rank, place.stream());
    for (int l = 0; l < layers; ++l) ops::project_rows(kv, d, l, rank, rows, place.stream());
  }
  // The random caches check what it gives. Here rows of a lower rank than 160 stay as they are.
  void check(Check& check) override {
    run(0);
    const std::vector<float> once = place.get(rows);
    run(0);
    check.equal("rows of low rank", place.get(rows), once, 1e-3);
  }
};

std::vector<Case> list() {
  std::vector<Case> v{on_caches("low_rank", "of ragged heads", 30, check_low_rank),
                      on_caches("low_rank", "in three parts", 30, check_parts)};
  for (const int layers : {1, 32}) {
    Case c{"low_rank", fmt::format("8 KV heads of 128, 32640 tokens, {} layers", layers)};
    c.make = [layers](Place& place, int) -> std::unique_ptr<Scene> {
      return std::make_unique<Timed>(place, 32640, layers);
    };
    c.work.reads = false;
    c.work.flops = layers * (32640. * 1024 * 1024 + 4. * 32640 * 1024 * 160 + 12. * std::pow(1024., 3));
    c.timed_cuda = true;
    c.runs = 3;
    v.push_back(std::move(c));
  }
  return v;
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
