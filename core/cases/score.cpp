// Scores of tokens: rows, norms, mass, moments of queries, and arithmetic on scores.
#include <fmt/format.h>
#include <kvlab/ops.hpp>

#include <algorithm>
#include <cmath>

#include "cases/layer.hpp"
#include "cases/on_caches.hpp"
#include "ops/page/reference.hpp"
#include "ops/score/combine.hpp"
#include "ops/score/reference.hpp"
#include "ops/score/turned.hpp"
#include "ops/select/reference.hpp"

namespace kvlab::cases {
namespace {

using Ints = std::vector<std::int32_t>;
using ops::Combine;

void check_combine(OnCache& x) {
  const std::int64_t rows = x.c.rows(), room = x.c.room();
  for (const Combine rule : {Combine::copy, Combine::add, Combine::multiply, Combine::divide})
    for (const std::int64_t heads : {1, x.c.kv_heads(), x.c.heads()}) {
      Numbers<3> start(x, {rows, x.c.heads(), room}), in(x, {rows, heads, room + 2});
      in.own()(0, 0, 0) = 0;
      const auto there = in.put();
      x.same<3>(
          fmt::format("combine by rule {}, {} heads", static_cast<int>(rule), heads), start.own(), 1e-6,
          [&](Scores out) {
            const Stream s = x.stream();
            if (rule == Combine::copy) ops::copy(out, there, s);
            if (rule == Combine::add) ops::add(out, there, -1.5f, s);
            if (rule == Combine::multiply) ops::multiply(out, there, s);
            if (rule == Combine::divide) ops::divide(out, there, s);
          },
          [&](Scores out) { ops::combine_reference(out, in.view(), rule, -1.5f); });
    }
}

// Numbers near, at, above and below a threshold, and those that are not finite.
void check_entries(OnCache& x) {
  const Stream s = x.stream();
  Numbers<3> in(x, {x.c.rows(), x.c.heads(), x.c.room()});
  const float special[] = {.25f, std::nextafter(.25f, 1.f), std::nextafter(.25f, 0.f), NAN, INFINITY, -INFINITY, -0.f};
  for (std::size_t i = 0; i < std::size(special) && static_cast<std::int64_t>(i) < x.c.room(); ++i)
    in.own()(0, x.c.heads() - 1, static_cast<std::int64_t>(i)) = special[i];
  for (const float threshold : {.25f, 0.f})
    x.same<3>(
        fmt::format("above {}", threshold), in.own(), 0, [&](Scores out) { ops::above(out, threshold, s); },
        [&](Scores out) { ops::above_reference(out, threshold); });
  for (const float add : {0.f, 2.f, 1e-10f})
    x.same<3>(
        fmt::format("logarithm of x + {}", add), in.own(), 1e-6, [&](Scores out) { ops::logarithm(out, add, s); },
        [&](Scores out) { ops::logarithm_reference(out, add); });
}

void check_norms(OnCache& x) {
  const Stream s = x.stream();
  const std::array<std::int64_t, 3> own{x.c.rows(), x.c.kv_heads(), x.c.room()};
  for (const KvSide side : {KvSide::key, KvSide::value})
    x.same<3>(
        "row_norm", Guarded<3>(own).view(), 1e-5,
        [&](Scores out) {
          ops::row_norm({&x.there, side}, out, s);
        },
        [&](Scores out) {
          ops::row_norm_reference({&x.kv, side}, out);
        });
  x.same<3>(
      "recency", Guarded<3>(own).view(), 0, [&](Scores out) { ops::recency(x.there, out, s); },
      [&](Scores out) { ops::recency_reference(x.kv, out); });
  std::vector<std::int32_t> seen;
  for (std::int64_t r = 0; r < x.c.rows(); ++r) seen.push_back(static_cast<std::int32_t>(x.c.rng() % 300));
  const std::int32_t* seen_there = x.place.put(seen);
  for (const int window : {1, 20, 1 << 30})
    x.same<3>(
        fmt::format("query_counts of the last {}", window), Guarded<3>(own).view(), 0,
        [&](Scores out) { ops::query_counts(x.there, seen_there, window, out, s); },
        [&](Scores out) { ops::query_counts_reference(x.kv, seen.data(), std::min(window, 400), out); });
  std::vector<std::uint64_t> keys;
  for (std::int64_t r = 0; r < x.c.rows(); ++r) keys.push_back(x.c.rng() * 0x100000001ull);
  const std::uint64_t* keys_there = x.place.put(keys);
  x.same<3>(
      "random_scores", Guarded<3>(own).view(), 0, [&](Scores out) { ops::random_scores(x.there, keys_there, out, s); },
      [&](Scores out) { ops::random_scores_reference(x.kv, keys.data(), out); });
  x.same<3>(
      "scale", Guarded<3>(own).view(), 0, [&](Scores out) { ops::scale(out, -3.f, s); },
      [&](Scores out) { ops::scale_reference(out, -3.f); });
}

void check_groups(OnCache& x) {
  const Stream s = x.stream();
  const std::array<std::int64_t, 3> own{x.c.rows(), x.c.kv_heads(), x.c.room()};
  Numbers<3> scores(x, {x.c.rows(), x.c.heads(), x.c.room()});
  const auto there = scores.put();
  for (const auto& [rule, word] : Choices<GroupRule>::all) {
    const auto scope = x.check.in(word);
    const GroupRule by = rule;
    x.same<3>(
        "group_reduce", Guarded<3>(own).view(), 1e-5,
        [&](Scores out) { ops::group_reduce(x.there, there, by, out, s); },
        [&](Scores out) { ops::group_reduce_reference(x.kv, scores.view(), by, out); });
    x.same<3>(
        "add_mass three times, read_state", Guarded<3>(own).view(), 1e-4,
        [&](Scores out) {
          for (int i = 0; i < 3; ++i) ops::add_mass(there, by, {&x.there, 1}, s);
          ops::read_state({&x.there, 1}, out, s);
        },
        [&](Scores out) {
          for (int i = 0; i < 3; ++i) ops::add_mass_reference(scores.view(), by, {&x.kv, 1});
          ops::read_state_reference({&x.kv, 1}, out);
        });
  }
  x.same<3>(
      "the other state column", Guarded<3>(own).view(), 0,
      [&](Scores out) {
        ops::read_state({&x.there, 0}, out, s);
      },
      [&](Scores out) {
        ops::read_state_reference({&x.kv, 0}, out);
      });
  for (const Pooling kind : {Pooling::none, Pooling::average, Pooling::max})
    for (const int kernel : {1, 3, 7})
      x.same<3>(
          fmt::format("pool of kind {}, {} tokens", static_cast<int>(kind), kernel), scores.own(), 1e-5,
          [&](Scores out) {
            HeapWorkspace w;
            ops::pool(x.there, out, kind, kernel, 5, w, s);
          },
          [&](Scores out) { ops::pool_reference(x.kv, out, kind, kernel, 5); });
}

void check_tokens(OnCache& x) {
  const std::int64_t rows = x.c.rows(), room = x.c.room(), pages = x.c.cache.options().max_pages;
  const Stream s = x.stream();
  for (const std::int64_t heads : {x.c.kv_heads(), x.c.heads()}) {
    const auto scope = x.check.in(fmt::format("{} heads", heads));
    Numbers<3> start(x, {rows, heads, room}, 3);
    const auto in = start.put();
    for (const float temperature : {1.f, 0.25f})
      x.same<3>(
          fmt::format("softmax at temperature {}", temperature), start.own(), 1e-5,
          [&](Scores out) { ops::softmax(x.there, out, temperature, s); },
          [&](Scores out) { ops::softmax_reference(x.kv, out, temperature); });
    x.same<3>(
        "softmax of -inf, but for one token of each head", start.own(), 1e-6,
        [&](Scores out) {
          ops::set_pinned(x.there, {.first = 1000, .last = 1000}, -INFINITY, out, s);
          ops::set_pinned(x.there, {.first = 1}, 5, out, s);
          ops::softmax(x.there, out, 1, s);
        },
        [&](Scores out) {
          ops::set_pinned_reference(x.kv, {.first = 1000, .last = 1000}, -INFINITY, out);
          ops::set_pinned_reference(x.kv, {.first = 1}, 5, out);
          ops::softmax_reference(x.kv, out, 1);
        });
    for (const Pins pins : {Pins{}, Pins{.first = 3}, Pins{.last = 2}, Pins{.first = 4, .last = 9}})
      x.same<3>(
          fmt::format("set_pinned, {} first, {} last", pins.first, pins.last), start.own(), 0,
          [&](Scores out) { ops::set_pinned(x.there, pins, -INFINITY, out, s); },
          [&](Scores out) { ops::set_pinned_reference(x.kv, pins, -INFINITY, out); });
    for (const GroupRule rule : {GroupRule::mean, GroupRule::max, GroupRule::sum})
      x.same<3>(
          fmt::format("layer_reduce by rule {}", static_cast<int>(rule)),
          Guarded<3>({rows, x.c.kv_heads(), room}).view(), 1e-5,
          [&](Scores out) { ops::layer_reduce(x.there, in, rule, out, s); },
          [&](Scores out) { ops::layer_reduce_reference(x.kv, start.view(), rule, out); });
    x.same<3>(
        "page_sum", Guarded<3>({rows, heads, pages + 1}).view(), 1e-5,
        [&](Scores out) { ops::page_sum(x.there, in, out, s); },
        [&](Scores out) { ops::page_sum_reference(x.kv, start.view(), out); });
  }
}

// Each blend changes one of two columns and must leave the other alone.
void check_state(OnCache& x) {
  const Stream s = x.stream();
  const std::array<std::int64_t, 3> own{x.c.rows(), x.c.kv_heads(), x.c.room()};
  Numbers<3> in(x, own);
  const auto in_there = in.put();
  struct Blend {
    int column;
    float keep, factor;
    bool ones;
  };
  for (const Blend& b : {Blend{0, 1, 1, true},
                         {1, 0, 2, false},
                         {0, 1, 1, true},
                         {1, .75f, .25f, false},
                         {1, .5f, 0, true},
                         {0, 0, 0, true},
                         {0, 0, -1, false},
                         {1, 0, INFINITY, true},
                         {1, 0, 0, true}}) {
    ops::blend_state({&x.there, b.column}, b.keep, b.ones ? View<const float, 3>{} : in_there, b.factor, s);
    ops::blend_state_reference({&x.kv, b.column}, b.keep, b.ones ? View<const float, 3>{} : in.view(), b.factor);
    for (const int column : {0, 1})
      x.same<3>(
          fmt::format("column {} after {} x column {} + {} x {}", column, b.keep, b.column, b.factor,
                      b.ones ? "1" : "scores"),
          Guarded<3>(own).view(), 1e-6,
          [&](Scores out) {
            ops::read_state({&x.there, column}, out, s);
          },
          [&](Scores out) {
            ops::read_state_reference({&x.kv, column}, out);
          });
  }
}

// The heads that are left out have no page on the device: an op that touched one would touch memory before frame 0.
void check_heads(OnCache& x) {
  const Stream s = x.stream();
  const std::array<std::int64_t, 3> own{x.c.rows(), x.c.kv_heads(), x.c.room()};
  const std::int64_t slots = x.kv.table.extent[0], heads = x.kv.table.extent[1], most = x.kv.table.extent[2];
  std::vector<std::uint8_t> flags;
  std::vector<PageEntry> pages;
  for (int slot = 0; slot < slots; ++slot)
    for (int head = 0; head < heads; ++head) {
      flags.push_back(static_cast<std::uint8_t>(x.c.pick({0, 1, 1})));
      for (int page = 0; page < most; ++page) {
        pages.push_back(x.kv.table(slot, head, page));
        if (!flags.back()) pages.back().frame = null_frame;
      }
    }
  PagedKv kv = x.kv, there = x.there;
  kv.table = View<const PageEntry, 3>::dense(pages.data(), x.kv.table.extent);
  there.table = x.place.put(kv.table);
  const auto marks = View<const std::uint8_t, 2>::dense(flags.data(), {slots, heads});
  const Heads some = Heads::flagged(marks), some_there = Heads::flagged(x.place.put(marks));
  Numbers<3> mass(x, {x.c.rows(), x.c.heads(), x.c.room()}), in(x, own);
  const auto mass_there = mass.put(), in_there = in.put();
  x.same<3>(
      "row_norm", Guarded<3>(own).view(), 1e-5,
      [&](Scores out) {
        ops::row_norm({&there, KvSide::key}, out, s, some_there);
      },
      [&](Scores out) {
        ops::row_norm_reference({&kv, KvSide::key}, out, some);
      });
  for (const GroupRule rule : {GroupRule::mean, GroupRule::softmax_mean})
    x.same<3>(
        "add_mass, blend_state, read_state", Guarded<3>(own).view(), 1e-4,
        [&](Scores out) {
          ops::add_mass(mass_there, rule, {&there, 1}, s, some_there);
          ops::blend_state({&there, 1}, .5f, in_there, 2, s, some_there);
          ops::read_state({&there, 1}, out, s, some_there);
        },
        [&](Scores out) {
          ops::add_mass_reference(mass.view(), rule, {&kv, 1}, some);
          ops::blend_state_reference({&kv, 1}, .5f, in.view(), 2, some);
          ops::read_state_reference({&kv, 1}, out, some);
        });
  x.same<3>(
      "the column of all heads", Guarded<3>(own).view(), 1e-4,
      [&](Scores out) {
        ops::read_state({&x.there, 1}, out, s);
      },
      [&](Scores out) {
        ops::read_state_reference({&x.kv, 1}, out);
      });
}

// Some tokens of each head. Pages of the others have no frame, which a read would show.
void check_range(OnCache& x, const KvRows& plain, const KvRows& there) {
  const std::int64_t rows = x.c.rows(), heads = x.c.kv_heads();
  const int p = x.kv.page_size;
  std::vector<std::int32_t> first, count;
  const std::int64_t entries = x.kv.table.extent[0] * x.kv.table.extent[1] * x.kv.table.extent[2];
  std::vector<PageEntry> table(x.kv.table.data, x.kv.table.data + entries);
  const bool by_rank = x.kv.rope == RopeRegime::cache_relative;  // ranks come from the positions of all tokens
  for (int r = 0; r < x.kv.rows; ++r)
    for (int h = 0; h < x.kv.kv_heads; ++h) {
      const int n = x.kv.tokens(r, h), from = static_cast<int>(x.c.rng() % static_cast<unsigned>(n + 1));
      const int most = static_cast<int>(x.c.rng() % static_cast<unsigned>(n - from + 1));
      first.push_back(from), count.push_back(most);
      for (int page = 0; !by_rank && page < x.kv.pages(r, h); ++page)
        if (most == 0 || (page + 1) * p <= from || page * p >= from + most)
          table[static_cast<std::size_t>(&x.kv.entry(r, h, page) - x.kv.table.data)].frame = null_frame;
    }
  const TokenRange range{View<const std::int32_t, 2>::dense(first.data(), {rows, heads}),
                         View<const std::int32_t, 2>::dense(count.data(), {rows, heads})};
  const TokenRange range_there{x.place.put(range.first), x.place.put(range.count)};
  PagedKv some = *there.kv;
  some.table = x.place.put(View<const PageEntry, 3>::dense(table.data(), x.kv.table.extent));
  x.same<4>(
      "read_range", Guarded<4>({rows, heads, x.c.room(), x.kv.head_dim}).view(), 2e-6,
      [&](View<float, 4> out) {
        ops::read_range({&some, there.side}, range_there, out, x.stream());
      },
      [&](View<float, 4> out) { ops::read_range_reference(plain, range, out); });
}

void check_rows(OnCache& x) {
  const std::int64_t rows = x.c.rows(), room = x.c.room(), dim = x.kv.head_dim;
  const Stream s = x.stream();
  for (const KvSide side : {KvSide::key, KvSide::value}) {
    const auto scope = x.check.in(side == KvSide::key ? "keys" : "values");
    const KvRows plain{&x.kv, side}, there{&x.there, side};
    x.same<4>(
        "read_rows", Guarded<4>({rows, x.c.kv_heads(), room, dim}).view(), 2e-6,
        [&](View<float, 4> out) { ops::read_rows(there, out, s); },
        [&](View<float, 4> out) { ops::read_rows_reference(plain, out); });
    check_range(x, plain, there);
    x.same<3>(
        "normalised_mean", Guarded<3>({rows, x.c.kv_heads(), dim}).view(), 2e-6,
        [&](View<float, 3> out) { ops::normalised_mean(there, out, s); },
        [&](View<float, 3> out) { ops::normalised_mean_reference(plain, out); });
    for (const std::int64_t heads : {x.c.kv_heads(), x.c.heads()}) {
      const auto of_heads = x.check.in(fmt::format("{} heads", heads));
      const Guarded<3> scores({rows, heads, room});
      Numbers<3> vectors(x, {rows, heads, dim});
      for (std::int64_t d = 0; d < dim; ++d) vectors.own()(0, 0, d) *= rows > 1 ? 0.f : 1.f;
      const auto vectors_there = vectors.put();
      x.same<3>(
          "row_dot", scores.view(), Tolerance{}.rows(x.kv, s),
          [&](Scores out) { ops::row_dot(there, vectors_there, out, s); },
          [&](Scores out) { ops::row_dot_reference(plain, vectors.view(), false, out); });
      x.same<3>(
          "row_cosine", scores.view(), 1e-5, [&](Scores out) { ops::row_cosine(there, vectors_there, out, s); },
          [&](Scores out) { ops::row_dot_reference(plain, vectors.view(), true, out); });
      Numbers<4> matrix(x, {rows, heads, dim, dim}, 1.f / static_cast<float>(dim));
      const auto matrix_there = matrix.put();
      x.same<3>(
          "row_quadratic", scores.view(), 1e-4, [&](Scores out) { ops::row_quadratic(there, matrix_there, out, s); },
          [&](Scores out) { ops::row_quadratic_reference(plain, matrix.view(), out); });
    }
    const std::int64_t many = 70 * x.c.kv_heads();  // more vectors than a kernel's pass takes
    Numbers<3> vectors(x, {rows, many, dim});
    const auto vectors_there = vectors.put();
    x.same<3>(
        "row_dot of many vectors", Guarded<3>({rows, many, room}).view(), Tolerance{}.rows(x.kv, s),
        [&](Scores out) { ops::row_dot(there, vectors_there, out, s); },
        [&](Scores out) { ops::row_dot_reference(plain, vectors.view(), false, out); });
  }
}

// Moments of queries whose mean is about `offset` times their spread. chunks: queries of each call.
void check_moments(OnCache& x, float offset, const std::vector<int>& chunks) {
  const auto scope = x.check.in(fmt::format("offset {}, chunks of {}", offset, fmt::join(chunks, ", ")));
  const std::int64_t rows = x.c.rows(), dim = x.kv.head_dim, heads = x.c.heads(), floats = ops::moment_floats(dim);
  const Stream s = x.stream();
  std::vector<float> zeros(static_cast<std::size_t>(x.kv.table.extent[0] * heads * floats));
  const auto wanted = View<float, 3>::dense(zeros.data(), {x.kv.table.extent[0], heads, floats});
  const auto got = x.place.put(wanted);
  Ints seen(static_cast<std::size_t>(rows));
  for (const int n : chunks) {
    for (std::size_t r = 0; r < seen.size(); ++r) seen[r] += n + (seen[r] == 0 ? static_cast<int>(r) * 3 : 0);
    Numbers<4> queries(x, {rows, heads, n, dim});
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t h = 0; h < heads; ++h)
        for (std::int64_t i = 0; i < n; ++i) {
          float* q = &queries.own()(r, h, i, 0);
          for (std::int64_t d = 0; d < dim; ++d) q[d] += offset * static_cast<float>(1 + h + d % 3);
          ops::rotate_reference(q, x.kv.rope_table, seen[static_cast<std::size_t>(r)] - n + i);
        }
    const auto* seen_there = x.place.put(seen);
    ops::add_moments(Tensor<4>(queries.put()), seen_there, x.there, 4, got, s);
    ops::add_moments_reference(queries.view(), seen.data(), x.kv, 4, wanted);
    // A sum adds a product for each query, and f32 rounds each. Larger queries are rounded more.
    const double queries_seen = *std::max_element(seen.begin(), seen.end());
    x.check.equal("add_moments", x.place.get(got), zeros, 1e-5 * queries_seen * (1 + offset));
    for (const int horizon : {1, 70}) {
      const auto at = x.check.in(fmt::format("horizon {}", horizon));
      const Guarded<3> mean({rows, heads, dim});
      const auto mean_there = x.place.put(mean.view());
      x.same<4>(
          "expected_query, covariance", Guarded<4>({rows, heads, dim, dim}).view(), 1e-4 * (1 + offset),
          [&](View<float, 4> out) { ops::expected_query(got, seen_there, x.there, horizon, mean_there, out, s); },
          [&](View<float, 4> out) {
            ops::expected_query_reference(wanted, seen.data(), x.kv, horizon, mean.view(), out);
          });
      x.check.equal("expected_query, mean", x.place.get(mean_there), mean.values(), 1e-5 * (1 + offset));
    }
  }
}

void check_moments_of(OnCache& x) {
  const std::vector<int> chunks{5 + x.c.pick({0, 40, 90}), 1 + x.c.pick({0, 30})};
  check_moments(x, 0, chunks);
  if (x.n % 4 == 0) check_moments(x, 30, chunks);
  if (x.n == 15) check_moments(x, 0, {1100, 2});  // more queries than one block sums
}

// Heads with more tokens than one block reads, or one turn of a block.
void check_long_heads(Place& place, Check& check) {
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  PagedFixture cache({1, 2, 16, 16, 80});
  cache.fill_random(0, 0, 1250, rng), cache.fill_random(0, 1, 300, rng);
  const PagedKv kv = cache.view(), there = place.put(kv, cache.arena_bytes());
  const Stream s = place.stream();
  std::vector<float> values(2 * 1250);
  for (float& x : values) x = 3 * normal(rng);
  const auto scores = View<float, 3>::dense(values.data(), {1, 2, 1250});
  same<3>(
      place, check, "softmax", scores, 1e-5, [&](Scores out) { ops::softmax(there, out, 1, s); },
      [&](Scores out) { ops::softmax_reference(kv, out, 1); });
  same<3>(
      place, check, "normalised_mean", Guarded<3>({1, 2, 16}).view(), 2e-6,
      [&](View<float, 3> out) {
        ops::normalised_mean({&there, KvSide::key}, out, s);
      },
      [&](View<float, 3> out) {
        ops::normalised_mean_reference({&kv, KvSide::key}, out);
      });
  std::vector<float> vectors(2 * 16), matrices(2 * 16 * 16);
  for (float& x : vectors) x = normal(rng);
  for (float& x : matrices) x = normal(rng) / 16;
  const auto vector = View<const float, 3>::dense(vectors.data(), {1, 2, 16});
  const auto matrix = View<const float, 4>::dense(matrices.data(), {1, 2, 16, 16});
  const auto vector_there = place.put(vector);
  const auto matrix_there = place.put(matrix);
  const Guarded<3> per_token({1, 2, 1250});
  same<4>(
      place, check, "read_rows", Guarded<4>({1, 2, 1250, 16}).view(), 2e-6,
      [&](View<float, 4> out) {
        ops::read_rows({&there, KvSide::value}, out, s);
      },
      [&](View<float, 4> out) {
        ops::read_rows_reference({&kv, KvSide::value}, out);
      });
  same<3>(
      place, check, "row_dot", per_token.view(), Tolerance{}.score,
      [&](Scores out) {
        ops::row_dot({&there, KvSide::key}, vector_there, out, s);
      },
      [&](Scores out) {
        ops::row_dot_reference({&kv, KvSide::key}, vector, false, out);
      });
  same<3>(
      place, check, "row_quadratic", per_token.view(), 1e-4,
      [&](Scores out) {
        ops::row_quadratic({&there, KvSide::key}, matrix_there, out, s);
      },
      [&](Scores out) {
        ops::row_quadratic_reference({&kv, KvSide::key}, matrix, out);
      });
  const auto in = place.put(View<const float, 3>(scores));
  same<3>(
      place, check, "layer_reduce", Guarded<3>({1, 2, 1250}).view(), 1e-5,
      [&](Scores out) { ops::layer_reduce(there, in, GroupRule::mean, out, s); },
      [&](Scores out) { ops::layer_reduce_reference(kv, scores, GroupRule::mean, out); });
}

// The scores of a layer's tokens.
Scores tokens_at(Place& place, int heads) {
  return View<float, 3>::dense(place.take<float>(std::size_t(heads) * Layer::tokens), {1, heads, Layer::tokens});
}

class RowNorm final : public Scene {
 public:
  RowNorm(Place& place, int copies) : place_(place), layer_(place, copies), out_(tokens_at(place, Layer::kv_heads)) {}
  void run(int copy) override {
    ops::row_norm({&layer_.there[static_cast<std::size_t>(copy)], KvSide::key}, out_, place_.stream());
  }
  void check(Check& check) override {
    const Guarded<3> wanted(out_.extent);
    ops::row_norm_reference({&layer_.plain, KvSide::key}, wanted.view());
    run(0);
    check.equal("row_norm", place_.get(out_), wanted.values(), 1e-5);  // as of random caches
  }

 private:
  Place& place_;
  Layer layer_;
  Scores out_;
};

class Mass final : public Scene {
 public:
  Mass(Place& place, int copies)
      : place_(place),
        layer_(place, copies),
        mass_(randoms(std::int64_t{Layer::query_heads} * Layer::tokens)),
        mass_there_(of(place.put(mass_))),
        out_(tokens_at(place, Layer::kv_heads)) {}
  void run(int copy) override {
    const PagedKv& kv = layer_.there[static_cast<std::size_t>(copy)];
    ops::add_mass(mass_there_, GroupRule::mean, {&kv, 0}, place_.stream());
    ops::read_state({&kv, 0}, out_, place_.stream());
  }
  void check(Check& check) override {
    const Guarded<3> wanted(out_.extent);
    ops::add_mass_reference(of(mass_.data()), GroupRule::mean, {&layer_.plain, 0});
    ops::read_state_reference({&layer_.plain, 0}, wanted.view());
    run(0);
    check.equal("add_mass, read_state", place_.get(out_), wanted.values(), 1e-5);  // as group_reduce of random caches
  }

 private:
  static View<const float, 3> of(const float* mass) {
    return View<const float, 3>::dense(mass, {1, Layer::query_heads, Layer::tokens});
  }
  Place& place_;
  Layer layer_;
  std::vector<float> mass_;
  View<const float, 3> mass_there_;
  Scores out_;
};

// Queries near those of the step before, some of them zeros. The threshold lies between two cosines.
void check_turned(OnCache& x) {
  const std::int64_t rows = x.c.rows(), heads = x.c.heads(), dim = x.kv.head_dim;
  std::int64_t slots = 0;
  for (int r = 0; r < rows; ++r) slots = std::max<std::int64_t>(slots, x.kv.slots[r] + 1);
  Numbers<3> queries(x, {rows, heads, dim}), last(x, {slots, heads, dim});
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t h = 0; h < heads; ++h)
      for (std::int64_t d = 0; d < dim; ++d) {
        float& then = last.own()(x.kv.slots[r], h, d);
        then = x.n % 4 == 3 && h % 3 == 0 ? 0 : then * .7f + queries.own()(r, h, d);
      }
  const auto cosine = ops::query_cosines_reference(queries.view(), x.kv, last.view());
  std::vector<double> sorted = cosine;
  std::sort(sorted.begin(), sorted.end());
  double threshold = sorted.front() - 1;
  for (std::size_t i = 1; i < sorted.size(); ++i)
    if (sorted[i] - sorted[i - 1] > 1e-4 && i >= sorted.size() / 2) threshold = (sorted[i] + sorted[i - 1]) / 2;
  const auto count = static_cast<std::size_t>(slots * x.kv.kv_heads);
  std::vector<std::uint8_t> flags(count, 7), wanted(count, 7);
  const HeadFlags turned = x.place.put(View<std::uint8_t, 2>::dense(flags.data(), {slots, x.kv.kv_heads}));
  const View<float, 3> there = x.place.put(last.own()), injected_there = x.place.put(last.own());
  ops::turned_heads(Tensor<3>(queries.put()), x.there, there, static_cast<float>(threshold), turned, x.stream());

  // Injected cosines stand in for those of query heads that have a last query.
  std::vector<std::uint32_t> sequence(static_cast<std::size_t>(slots)), calls(sequence), later;
  std::mt19937 rng(x.n);
  for (auto& s : sequence) s = rng() % 1000;
  for (auto& c : calls) c = rng() % 50;
  ops::InjectedTurns turns{400'000, sequence.data(), {}, static_cast<int>(x.n % 5), x.n};
  std::vector<std::uint8_t> drawn(count, 7);
  later = calls;
  for (int r = 0; r < x.kv.rows; ++r) {
    const int slot = x.kv.slots[r], group = static_cast<int>(heads) / x.kv.kv_heads;
    for (int h = 0; h < x.kv.kv_heads; ++h) {
      float sum = 0;
      for (int q = h * group; q < (h + 1) * group; ++q)
        if (last.own()(slot, q, 0) != 0) sum += turns.cosine(slot, h, calls[static_cast<std::size_t>(slot)]);
      drawn[static_cast<std::size_t>(slot * x.kv.kv_heads + h)] = sum / static_cast<float>(group) < threshold;
    }
    ++later[static_cast<std::size_t>(slot)];
  }
  turns.sequence = x.place.put(sequence);
  turns.calls = x.place.put(View<std::uint32_t, 1>::dense(calls.data(), {slots}));
  ops::InjectedUse used;
  const ops::Injected injected{nullptr, &turns, &used};
  PagedKv with = x.there;
  with.injected = &injected;
  const HeadFlags drawn_there = x.place.put(View<std::uint8_t, 2>::dense(flags.data(), {slots, x.kv.kv_heads}));
  ops::turned_heads(Tensor<3>(queries.put()), with, injected_there, static_cast<float>(threshold), drawn_there,
                    x.stream());
  x.check.that("injected turns are marked", x.place.get(drawn_there) == drawn);
  x.check.that("calls are counted", x.place.get(turns.calls) == later);
  x.check.equal("the queries are kept", x.place.get(injected_there), x.place.get(there), 0);
  x.check.that("the injection is noted", used.turns && !used.lists && !used.drift);

  for (int r = 0; r < x.kv.rows; ++r)
    for (int h = 0; h < x.kv.kv_heads; ++h) {
      const auto head = static_cast<std::size_t>(r * x.kv.kv_heads + h);
      wanted[static_cast<std::size_t>(x.kv.slots[r] * x.kv.kv_heads + h)] = cosine[head] < threshold;
      for (std::int64_t q = 0; q < heads; ++q)
        for (std::int64_t d = 0; d < dim; ++d) last.own()(x.kv.slots[r], q, d) = queries.own()(r, q, d);
    }
  x.check.that("turned heads are marked", x.place.get(turned) == wanted);
  x.check.equal("the queries are kept", x.place.get(there), Guarded<3>::copy(last.view()), 0);
}

// Marks of random heads at the place and here. Heads that are left out have no page on the device.
struct SomeHeads {
  std::vector<std::uint8_t> flags;
  std::vector<PageEntry> pages;
  PagedKv kv, there;
  Heads heads, heads_there;

  SomeHeads(const PagedKv& of, const PagedKv& of_there, Place& place, std::mt19937& rng) : kv(of), there(of_there) {
    for (std::int64_t slot = 0; slot < of.table.extent[0]; ++slot)
      for (std::int64_t head = 0; head < of.table.extent[1]; ++head) {
        flags.push_back(rng() % 3 > 0);
        for (std::int64_t page = 0; page < of.table.extent[2]; ++page) {
          pages.push_back(of.table(slot, head, page));
          if (!flags.back()) pages.back().frame = null_frame;
        }
      }
    kv.table = View<const PageEntry, 3>::dense(pages.data(), of.table.extent);
    there.table = place.put(kv.table);
    const auto marks = View<const std::uint8_t, 2>::dense(flags.data(), {of.table.extent[0], of.table.extent[1]});
    heads = Heads::flagged(marks), heads_there = Heads::flagged(place.put(marks));
  }
};

// Scratch where the case runs.
class ScratchOf final : public Workspace {
 public:
  explicit ScratchOf(Place& place) : place_(place) {}
  void* scratch(const char*, std::size_t bytes) override { return place_.take<std::byte>(bytes); }
  void* state(const char*, std::size_t, int) override { return nullptr; }
  const void* constant(const char*, const void*, std::size_t) override { return nullptr; }

 private:
  Place& place_;
};

// Each query of a group has a row of attention of its own. Rows are pooled and reduced by step.
void check_window(Place& place, Check& check, const PagedKv& kv, const PagedKv& there, int group, std::mt19937& rng,
                  double margin) {
  const int steps = 1 + static_cast<int>(rng() % 5);
  const std::int64_t rows = kv.rows, kv_heads = kv.kv_heads, count = std::int64_t{steps} * group, dim = kv.head_dim;
  const std::int64_t room = kv.table.extent[2] * kv.page_size + 3;
  const SomeHeads some(kv, there, place, rng);
  const Stream s = place.stream();
  const Guarded<4> window({rows, kv_heads * count, 1, dim});
  std::normal_distribution<float> normal;
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t q = 0; q < kv_heads * count; ++q)
      for (std::int64_t d = 0; some.heads.on(kv.slots[r], static_cast<int>(q / count)) && d < dim; ++d)
        window(r, q, 0, d) = normal(rng);
  const View<float, 4> window_there = place.put(window.view());

  // Heads that are left out have a poisoned window, and their queries give votes that nobody wants.
  const Guarded<3> votes({rows, kv_heads * count, room}), reduced({rows, kv_heads * steps, room});
  const View<float, 3> votes_there = place.put(votes.view()), reduced_there = place.put(reduced.view());
  ops::window_votes(Tensor<4>(window_there), nullptr, some.there, votes_there, s, some.heads_there);
  ops::window_votes_reference(window.view(), nullptr, some.kv, votes.view(), some.heads);
  check.equal("window_votes of some heads", place.get(votes_there), Guarded<3>::copy(votes.view()), margin);
  ScratchOf w(place);
  {  // one op does the three
    const Pooling kind = rng() % 2 ? Pooling::average : Pooling::max;
    const int kernel = 1 + 2 * static_cast<int>(rng() % 5);
    const Guarded<3> shares(votes.view().extent), once({kv.rows, kv_heads * steps, room});
    const std::vector<float> before = Guarded<3>::copy(votes.view());
    std::copy(before.begin(), before.end(), shares.view().data);
    for (const GroupRule rule : {GroupRule::max, GroupRule::mean, GroupRule::softmax_mean}) {
      const View<float, 3> once_there = place.put(once.view());
      ops::pooled_votes(Tensor<4>(window_there), some.there, {kind, kernel, rule}, once_there, w, s, some.heads_there);
      if (rule == GroupRule::max) ops::pool_reference(some.kv, shares.view(), kind, kernel, 0, some.heads);
      ops::group_reduce_reference(some.kv, shares.view(), rule, once.view(), some.heads);
      check.equal("pooled_votes of some heads", place.get(once_there), Guarded<3>::copy(once.view()), margin);
    }
  }
  ops::pool(some.there, votes_there, Pooling::average, 5, 0, w, s, some.heads_there);
  ops::pool_reference(some.kv, votes.view(), Pooling::average, 5, 0, some.heads);
  check.equal("pool of some heads", place.get(votes_there), Guarded<3>::copy(votes.view()), margin);
  for (const GroupRule rule : {GroupRule::max, GroupRule::softmax_mean}) {
    ops::group_reduce(some.there, votes_there, rule, reduced_there, s, some.heads_there);
    ops::group_reduce_reference(some.kv, votes.view(), rule, reduced.view(), some.heads);
    check.equal("group_reduce of some heads, by step", place.get(reduced_there), Guarded<3>::copy(reduced.view()),
                margin);
  }
}

void check_windows(OnCache& x) {
  check_window(x.place, x.check, x.kv, x.there, x.c.group, x.c.rng,
               x.stream().device() == Device::cpu ? 5 * Tolerance{}.probability : 2e-4);
}

// Logits of some heads, of caches that have grown since: the softmax is over the first tokens.
void check_logits(Place& place, Check& check) {
  std::mt19937 rng(7);
  for (int n = 0; n < 60; n += quick() ? 7 : 1) {
    const auto scope = check.in(fmt::format("logits {}", n));
    const int rows = 1 + n % 3, heads = 1 + n % 5,
              group = std::array{4, 1, 3, 8, 16, 7}[static_cast<std::size_t>(n % 6)];
    const int most = n % 7 == 0 ? 9000 : n % 2 ? 600 : 40;
    std::vector<std::int32_t> length, slots, index(static_cast<std::size_t>(heads), -1);
    std::vector<std::uint8_t> flags;
    for (int i = 0; i < rows * heads; ++i)
      length.push_back(static_cast<int>(rng() % static_cast<unsigned>(most))), flags.push_back(rng() % 4 > 0);
    for (int r = 0; r < rows; ++r) slots.push_back(rows - 1 - r);
    int count = 0;
    for (int h = heads - 1; h >= 0; --h)
      if (h % 3 != 1) index[static_cast<std::size_t>(h)] = count++;
    const LengthsOnly memory(rows, heads, 16, length);
    PagedKv kv = memory.view();
    kv.slots = slots.data();
    const PagedKv there = place.put(kv, memory.bytes());
    const std::int64_t room = kv.table.extent[2] * 16 + 3;
    std::normal_distribution<float> normal(0, 3);
    std::vector<float> x(static_cast<std::size_t>(rows * count * room * group));
    for (float& y : x) y = rng() % 40 ? 20 + normal(rng) : -std::numeric_limits<float>::infinity();
    const auto marks = View<const std::uint8_t, 2>::dense(flags.data(), {rows, heads});
    const HeadLogits logits{View<float, 4>::dense(x.data(), {rows, count, room, group}), index.data(),
                            Heads::flagged(marks)};
    const HeadLogits logits_there{place.put(logits.out), place.put(index), Heads::flagged(place.put(marks))};
    using enum GroupRule;
    const ops::VotePooling pooling{std::array{Pooling::average, Pooling::max, Pooling::none}[rng() % 3],
                                   n % 10 == 9 ? 201 : 1 + 2 * static_cast<int>(rng() % 5),
                                   std::array{max, max, mean, sum}[rng() % 4]};
    const Guarded<3> out({rows, heads, room});
    const View<float, 3> out_there = place.put(out.view());
    ops::pooled_logits(there, logits_there, pooling, out_there, place.stream());
    ops::pooled_logits_reference(kv, logits, pooling, out.view());
    check.equal("pooled_logits", place.get(out_there), Guarded<3>::copy(out.view()), 5 * Tolerance{}.probability);
  }
}

// Shapes of the tensor cores, with a group that fills several tiles of queries.
void check_wide_windows(Place& place, Check& check) {
  std::mt19937 rng(5);
  for (const int dim : {64, 96, 128, 256})
    for (const CodecSide keys : {CodecSide{}, CodecSide{8}}) {
      const auto scope = check.in(fmt::format("head size {}, {} bits", dim, int{keys.bits}));
      PagedOptions o;
      o.rows = 2, o.kv_heads = 3, o.head_dim = dim, o.page_size = 16, o.max_pages = 26, o.dtype = DType::bf16;
      o.codec.k = keys;
      PagedFixture cache(o);
      const int lengths[] = {400, 130, 1, 17, 0, 259};
      for (int i = 0; i < 6; ++i) cache.fill_random(i / 3, i % 3, lengths[i], rng);
      check_window(place, check, cache.view(), place.put(cache.view(), cache.arena_bytes()), 7, rng,
                   place.stream().device() == Device::cpu ? 5 * Tolerance{}.probability : 2e-4);
    }
}

std::vector<Case> list() {
  std::vector<Case> v;
  const auto add = [&](const char* shape, void (*check)(OnCache&)) {
    v.push_back(on_caches("score", shape, 36, check));
  };
  add("arithmetic", check_combine);
  add("thresholds and logarithms", check_entries);
  add("norms, recency and draws", check_norms);
  add("groups, mass and pooling", check_groups);
  add("softmax, pins, layers and sums of pages", check_tokens);
  add("blended state", check_state);
  add("some heads", check_heads);
  add("rows", check_rows);
  add("moments of queries", check_moments_of);
  add("turned heads", check_turned);
  v.push_back(checked("score", "heads longer than a block", check_long_heads));
  const int tokens = Layer::tokens;
  v.push_back(on_layer<RowNorm>(fmt::format("row_norm of keys, {} tokens", tokens),
                                {.bytes = 2. * Layer::kv_heads * tokens * Layer::head_dim}));
  const double column = 4. * Layer::kv_heads * tokens;
  v.push_back(on_layer<Mass>(fmt::format("add_mass and read_state, {} tokens", tokens),
                             {.bytes = 4. * Layer::query_heads * tokens + 4 * column}));
  add("windows of queries of some heads", check_windows);
  v.push_back(checked("score", "windows of queries in the tensor cores' shapes", check_wide_windows));
  v.push_back(checked("score", "logits that attention left", check_logits));
  return v;
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
