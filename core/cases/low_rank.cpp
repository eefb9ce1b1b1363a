// Rows of low rank, of ragged heads, and factors of keys.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/half.hpp"
#include "cases/on_caches.hpp"
#include "ops/score/key_factors.hpp"
#include "ops/score/low_rank.hpp"
#include "ops/score/reference.hpp"

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

// Factors of all slots of a cache, as KeptKeyFactors lays them out, in vectors or at a place.
struct Factors {
  std::vector<std::byte> memory;
  KeyFactors view;

  Factors(const PagedKv& kv, int places, DType dtype, int rank) {
    const auto element = static_cast<std::int64_t>(size_of(dtype)), width = std::int64_t{kv.kv_heads} * kv.head_dim;
    view.dtype = dtype, view.rank = rank, view.row = (rank + 7) / 8 * 8;
    view.kv_heads = kv.kv_heads, view.pages = static_cast<int>(kv.table.extent[2]), view.places = places;
    tokens = view.row * element * view.places, basis = tokens + (rank * width * element + 15) / 16 * 16;
    whole = basis + (view.kv_heads * view.pages + 15) / 16 * 16;
    view.slot_bytes = whole + 16;
    memory.assign(static_cast<std::size_t>(view.slot_bytes * kv.length.extent[0]), std::byte{0});
    point(memory.data());
  }
  Factors(const Factors&) = delete;
  void point(std::byte* data) {
    view.tokens = data, view.basis = data + tokens;
    view.whole = reinterpret_cast<std::uint8_t*>(data + basis);
    view.count = reinterpret_cast<std::int32_t*>(data + whole);
  }
  // Random numbers for so many places of every slot.
  void fill(OnCache& x, int count) {
    for (std::int64_t slot = 0; slot < x.kv.length.extent[0]; ++slot) {
      std::byte* of = memory.data() + slot * view.slot_bytes;
      const std::int64_t numbers = basis / static_cast<std::int64_t>(size_of(view.dtype));
      const std::vector<float> values = x.c.normal(numbers);
      for (std::int64_t i = 0; i < numbers; ++i) {
        const float y = values[static_cast<std::size_t>(i)];
        const std::uint16_t bits = view.dtype == DType::f16 ? float_to_half(y) : bf16(y).bits;
        if (view.dtype == DType::f32)
          std::memcpy(of + 4 * i, &y, 4);
        else
          std::memcpy(of + 2 * i, &bits, 2);
      }
      view.count_of(static_cast<int>(slot)) = count;
    }
  }

 private:
  std::int64_t tokens, basis, whole;
};

PagedKv by_text(PagedKv kv) {
  kv.rope = RopeRegime::original;
  return kv;
}

void check_rebuild(OnCache& x) {
  Numbers<4> rows(x, {x.c.rows(), x.c.kv_heads(), x.c.room(), x.kv.head_dim});
  const int width = x.kv.kv_heads * x.kv.head_dim;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const int rank : {1, std::min(width, 37), width}) {
      if (rank == width && dtype != DType::bf16) continue;
      Factors f(x.kv, x.c.room(), dtype, rank);
      f.fill(x, x.c.pick({0, 5, 40, x.c.room()}));
      Factors there(x.kv, x.c.room(), dtype, rank);
      there.point(x.place.put(f.memory));
      x.same<4>(
          fmt::format("rebuild_rows of rank {} in {}", rank, name_of(dtype)), rows.own(), 1e-5,
          [&](View<float, 4> out) { ops::rebuild_rows(by_text(x.there), there.view, out, x.stream()); },
          [&](View<float, 4> out) { ops::rebuild_rows_reference(by_text(x.kv), f.view, out); });
    }
}

// The rows of a batch as those of layers. Factors of the whole way there give the rows of low rank, with RoPE.
void check_factors(OnCache& x) {
  const std::int64_t rows = x.c.rows(), heads = x.c.kv_heads(), room = x.c.room(), dim = x.kv.head_dim;
  const std::int64_t width = heads * dim;
  if (width > 160) return;
  Numbers<4> keys(x, {rows, heads, room, dim});
  if (x.n % 3 == 0) std::fill_n(&keys.own()(0, 0, 0, 0), heads * room * dim, 0.f);
  auto* memory = x.place.put(std::vector<std::byte>(RankDirections::bytes(rows, width), std::byte{0xff}));
  const RankDirections d = RankDirections::in(memory, rows, width);
  const auto of_row = [](const PagedKv& kv, std::int64_t r) {
    PagedKv one = by_text(kv);
    one.slots += r, one.rows = 1;
    return one;
  };
  const auto rows_of = [](View<float, 4> all, std::int64_t r) {
    all.data += r * all.stride[0], all.extent[0] = 1;
    return all;
  };
  // Every third token of a head is exact.
  std::vector<std::int32_t> index(static_cast<std::size_t>(rows * heads * room)), counts(index.size());
  TokenList exact;
  exact.index = View<std::int32_t, 3>::dense(index.data(), {rows, heads, room});
  exact.count = View<std::int32_t, 2>::dense(counts.data(), {rows, heads});
  for (std::int64_t r = 0; r < rows; ++r)
    for (int h = 0; h < heads; ++h) {
      const int n = x.kv.tokens(static_cast<int>(r), h);
      exact.count(r, h) = 0;
      for (int t = h; t < n; t += 23) exact.index(r, h, exact.count(r, h)++) = t;
    }
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const int rank : {1, static_cast<int>(width) / 2 + 1, static_cast<int>(width)}) {
      Factors there(x.kv, x.c.room(), dtype, rank);
      auto* at = x.place.put(there.memory);
      there.point(at);
      const auto bytes = static_cast<std::int64_t>(there.memory.size());
      x.same<4>(
          fmt::format("factors of rank {} in {}", rank, name_of(dtype)), keys.own(), dtype == DType::f32 ? 1e-5 : 2e-2,
          [&](View<float, 4> out) {
            for (std::int64_t r = 0; r < rows; ++r)
              ops::row_products(of_row(x.there, r), rows_of(out, r), d, static_cast<int>(r), x.stream());
            ops::rank_directions(d, x.stream());
            for (std::int64_t r = rows - 1; r >= 0; --r) {
              TokenList of = x.place.put(exact);
              of.index.data += r * of.index.stride[0], of.count.data += r * of.count.stride[0];
              ops::factor_rows(of_row(x.there, r), d, static_cast<int>(r), rows_of(out, r), of, there.view, x.stream());
            }
            ops::rebuild_rows(by_text(x.there), there.view, out, x.stream());
          },
          [&](View<float, 4> out) {
            ops::low_rank_reference(x.kv, rank, out);
            ops::turn_rows_reference(by_text(x.kv), ops::RopeTurn::on, out, {});
          });
      // What the place says of single pages.
      const std::vector<std::byte> got = x.place.get(View<const std::byte, 1>::dense(at, {bytes}));
      Factors copy(x.kv, x.c.room(), dtype, rank);
      copy.memory = got;
      copy.point(copy.memory.data());
      for (std::int64_t r = 0; r < rows; ++r)
        for (int h = 0; h < heads; ++h)
          for (int page = 0; page < copy.view.pages; ++page) {
            const int p = x.kv.page_size, begin = page * p;
            int most = 0;
            for (int g = 0; g < heads; ++g) most = std::max(most, x.kv.tokens(static_cast<int>(r), g));
            bool own = false;
            for (int t = h; t < x.kv.tokens(static_cast<int>(r), h); t += 23) own |= t >= begin && t < begin + p;
            x.check.that(fmt::format("row {}, head {}, page {}: factors cover it or not", r, h, page),
                         copy.view.cover(x.kv.slots[r], h, page, p) == (begin + p <= most && !own));
          }
    }
}

// A prompt of Llama 3.1 8B's shape: one layer, and the vectors of all layers.
struct Timed final : Scene {
  Place& place;
  PagedFixture cache;
  int layers, rank = 160;
  PagedKv kv;
  View<float, 4> rows, out;
  RankDirections d;
  KeyFactors factors;
  TokenList exact;

  Timed(Place& at, int tokens, int of_layers)
      : place(at), cache({1, 8, 128, 32, (tokens + 31) / 32}), layers(of_layers) {
    for (int h = 0; h < 8; ++h) cache.fill_pooled(0, h, tokens, [](int t) { return t; });
    kv = place.put(cache.view(), cache.arena_bytes());
    rows = View<float, 4>::dense(place.put(normals(std::int64_t{8} * tokens * 128, 7)), {1, 8, tokens, 128});
    out = place.unwritten<4>({1, 8, tokens, 128});
    Factors f(cache.view(), tokens, DType::bf16, rank);
    f.point(place.put(f.memory));
    factors = f.view;
    exact.index = View<std::int32_t, 3>::dense(place.put(std::vector<std::int32_t>(8)), {1, 8, 1});
    exact.count = View<std::int32_t, 2>::dense(place.put(std::vector<std::int32_t>(8)), {1, 8});
    d = RankDirections::in(place.take<double>(RankDirections::bytes(layers, 1024) / 8), layers, 1024);
  }
  void run(int) override {
    for (int l = 0; l < layers; ++l) ops::row_products(kv, rows, d, l, place.stream());
    ops::rank_directions(d, place.stream());
    for (int l = 0; l < layers; ++l) ops::factor_rows(kv, d, l, rows, exact, factors, place.stream());
    ops::rebuild_rows(kv, factors, out, place.stream());
  }
  // The random caches check what it gives. Here rows of that rank stay as they are, but for the factors' rounding.
  void check(Check& check) override {
    run(0);
    ops::turn_rows(kv, ops::RopeTurn::off, out, place.stream());
    const std::vector<float> once = place.get(out);
    copy_memory(rows.data, out.data, once.size() * sizeof(float), place.stream());
    run(0);
    ops::turn_rows(kv, ops::RopeTurn::off, out, place.stream());
    check.equal("rows of low rank", place.get(out), once, 2e-2);
  }
};

std::vector<Case> list() {
  std::vector<Case> v{on_caches("low_rank", "of ragged heads", 30, check_low_rank),
                      on_caches("key_factors", "of ragged heads", 30, check_factors),
                      on_caches("key_factors", "that keys come from", 30, check_rebuild)};
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
