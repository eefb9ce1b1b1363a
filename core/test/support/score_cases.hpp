// Cases of the ops that score with rows, moments and other scores. Each device runs them with a Place of its own: put()
// copies a view to the device, get() returns a dense copy.
#pragma once
#include <kvlab/ops.hpp>

#include <catch2/catch.hpp>
#include <deque>
#include <string>
#include <vector>

#include "cases/paged_fixture.hpp"
#include "ops/page/reference.hpp"
#include "ops/score/combine.hpp"
#include "ops/score/reference.hpp"
#include "ops/select/reference.hpp"

namespace kvlab::test {

using namespace cases;

using ops::Combine;

// The CPU's Place. Margins enclose each copy.
class OnHost {
 public:
  Stream stream() const { return Stream::cpu(); }
  PagedKv put(const PagedKv& kv, std::size_t) const { return kv; }
  template <class T, int Rank>
  View<T, Rank> put(View<T, Rank> dense) {
    std::size_t n = 1;
    for (const auto e : dense.extent) n *= static_cast<std::size_t>(e);
    auto& memory = memory_.emplace_back((2 * margin + n * sizeof(T)), std::byte{0xA5});
    std::memcpy(memory.data() + margin, dense.data, n * sizeof(T));
    return View<T, Rank>::dense(reinterpret_cast<std::remove_const_t<T>*>(memory.data() + margin), dense.extent);
  }
  template <int Rank>
  std::vector<float> get(View<float, Rank> dense) const {
    bool intact = true;
    for (const auto& m : memory_)
      for (std::size_t i = 0; i < margin; ++i)
        intact &= m[i] == std::byte{0xA5} && m[m.size() - 1 - i] == std::byte{0xA5};
    REQUIRE(intact);
    return Guarded<Rank>::copy(dense);
  }

 private:
  static constexpr std::size_t margin = 64;
  std::deque<std::vector<std::byte>> memory_;
};

// The op and its reference must give the same numbers, each on its own copy of `start`.
template <class Place, int Rank, class Op, class Plain>
void same(Place& place, const char* what, View<float, Rank> start, double margin, const Op& op, const Plain& plain) {
  INFO(what);
  const auto got = place.put(start);
  std::vector<float> wanted = Guarded<Rank>::copy(start);
  plain(View<float, Rank>::dense(wanted.data(), start.extent));
  op(got);
  CHECK(Tolerance::worst(place.get(got), wanted) <= margin);
}

template <int Rank>
class Numbers {
 public:
  Numbers(RandomCache& c, std::array<std::int64_t, Rank> extent, float factor = 1) {
    std::int64_t n = 1;
    for (const auto e : extent) n *= e;
    values_ = c.normal(n);
    for (float& x : values_) x *= factor;
    view_ = View<float, Rank>::dense(values_.data(), extent);
  }
  View<float, Rank> own() const { return view_; }
  View<const float, Rank> view() const { return view_; }

 private:
  std::vector<float> values_;
  View<float, Rank> view_;
};

template <class Place>
void check_combine(Place& place, RandomCache& c) {
  const std::int64_t room = c.room();
  for (const Combine rule : {Combine::copy, Combine::add, Combine::multiply, Combine::divide})
    for (const std::int64_t heads : {1, c.kv_heads(), c.heads()}) {
      CAPTURE(static_cast<int>(rule), heads);
      Numbers<3> start(c, {c.rows(), c.heads(), room}), in(c, {c.rows(), heads, room + 2});
      in.own()(0, 0, 0) = 0;
      const auto there = place.put(in.view());
      same<Place, 3>(
          place, "combine", start.own(), 1e-6,
          [&](Scores out) {
            const Stream s = place.stream();
            if (rule == Combine::copy) ops::copy(out, there, s);
            if (rule == Combine::add) ops::add(out, there, -1.5f, s);
            if (rule == Combine::multiply) ops::multiply(out, there, s);
            if (rule == Combine::divide) ops::divide(out, there, s);
          },
          [&](Scores out) { ops::combine_reference(out, in.view(), rule, -1.5f); });
    }
}

template <class Place>
void check_scores_of_tokens(Place& place, RandomCache& c, const PagedKv& kv, const PagedKv& there) {
  const std::int64_t room = c.room(), pages = c.cache.options().max_pages;
  const Stream s = place.stream();
  const Guarded<3> own({c.rows(), c.kv_heads(), room}), own_pages({c.rows(), c.kv_heads(), pages + 1}),
      all_pages({c.rows(), c.heads(), pages + 1});
  for (const std::int64_t heads : {c.kv_heads(), c.heads()}) {
    Numbers<3> start(c, {c.rows(), heads, room}, 3);
    const auto in = place.put(start.view());
    for (const float temperature : {1.f, 0.25f})
      same<Place, 3>(
          place, "softmax", start.own(), 1e-5, [&](Scores out) { ops::softmax(there, out, temperature, s); },
          [&](Scores out) { ops::softmax_reference(kv, out, temperature); });
    same<Place, 3>(
        place, "softmax of -inf, but for one token of each head", start.own(), 1e-6,
        [&](Scores out) {
          ops::set_pinned(there, {.first = 1000, .last = 1000}, -INFINITY, out, s);
          ops::set_pinned(there, {.first = 1}, 5, out, s);
          ops::softmax(there, out, 1, s);
        },
        [&](Scores out) {
          ops::set_pinned_reference(kv, {.first = 1000, .last = 1000}, -INFINITY, out);
          ops::set_pinned_reference(kv, {.first = 1}, 5, out);
          ops::softmax_reference(kv, out, 1);
        });
    for (const Pins pins : {Pins{}, Pins{.first = 3}, Pins{.last = 2}, Pins{.first = 4, .last = 9}})
      same<Place, 3>(
          place, "set_pinned", start.own(), 0, [&](Scores out) { ops::set_pinned(there, pins, -INFINITY, out, s); },
          [&](Scores out) { ops::set_pinned_reference(kv, pins, -INFINITY, out); });
    for (const GroupRule rule : {GroupRule::mean, GroupRule::max, GroupRule::sum})
      same<Place, 3>(
          place, "layer_reduce", own.view(), 1e-5, [&](Scores out) { ops::layer_reduce(there, in, rule, out, s); },
          [&](Scores out) { ops::layer_reduce_reference(kv, start.view(), rule, out); });
    same<Place, 3>(
        place, "page_sum", heads == c.heads() ? all_pages.view() : own_pages.view(), 1e-5,
        [&](Scores out) { ops::page_sum(there, in, out, s); },
        [&](Scores out) { ops::page_sum_reference(kv, start.view(), out); });
  }
  // Each blend changes one of two columns and must leave the other alone.
  Numbers<3> in(c, {c.rows(), c.kv_heads(), room});
  const auto in_there = place.put(in.view());
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
    CAPTURE(b.column, b.keep, b.factor, b.ones);
    ops::blend_state({&there, b.column}, b.keep, b.ones ? View<const float, 3>{} : in_there, b.factor, s);
    ops::blend_state_reference({&kv, b.column}, b.keep, b.ones ? View<const float, 3>{} : in.view(), b.factor);
    for (const int column : {0, 1})
      same<Place, 3>(
          place, "blend_state", own.view(), 1e-6,
          [&](Scores out) {
            ops::read_state({&there, column}, out, s);
          },
          [&](Scores out) {
            ops::read_state_reference({&kv, column}, out);
          });
  }
}

template <class Place>
void check_rows(Place& place, RandomCache& c, const PagedKv& kv, const PagedKv& there) {
  const std::int64_t room = c.room(), dim = kv.head_dim;
  const Stream s = place.stream();
  for (const KvSide side : {KvSide::key, KvSide::value}) {
    CAPTURE(side == KvSide::key);
    const KvRows plain{&kv, side}, rows{&there, side};
    same<Place, 4>(
        place, "read_rows", Guarded<4>({c.rows(), c.kv_heads(), room, dim}).view(), 2e-6,
        [&](View<float, 4> out) { ops::read_rows(rows, out, s); },
        [&](View<float, 4> out) { ops::read_rows_reference(plain, out); });
    same<Place, 3>(
        place, "normalised_mean", Guarded<3>({c.rows(), c.kv_heads(), dim}).view(), 2e-6,
        [&](View<float, 3> out) { ops::normalised_mean(rows, out, s); },
        [&](View<float, 3> out) { ops::normalised_mean_reference(plain, out); });
    for (const std::int64_t heads : {c.kv_heads(), c.heads()}) {
      const Guarded<3> scores({c.rows(), heads, room});
      Numbers<3> vectors(c, {c.rows(), heads, dim});
      for (std::int64_t d = 0; d < dim; ++d) vectors.own()(0, 0, d) *= c.rows() > 1 ? 0.f : 1.f;
      const auto vectors_there = place.put(vectors.view());
      same<Place, 3>(
          place, "row_dot", scores.view(), Tolerance{}.score,
          [&](Scores out) { ops::row_dot(rows, vectors_there, out, s); },
          [&](Scores out) { ops::row_dot_reference(plain, vectors.view(), false, out); });
      same<Place, 3>(
          place, "row_cosine", scores.view(), 1e-5, [&](Scores out) { ops::row_cosine(rows, vectors_there, out, s); },
          [&](Scores out) { ops::row_dot_reference(plain, vectors.view(), true, out); });
      Numbers<4> matrix(c, {c.rows(), heads, dim, dim}, 1.f / static_cast<float>(dim));
      const auto matrix_there = place.put(matrix.view());
      same<Place, 3>(
          place, "row_quadratic", scores.view(), 1e-4,
          [&](Scores out) { ops::row_quadratic(rows, matrix_there, out, s); },
          [&](Scores out) { ops::row_quadratic_reference(plain, matrix.view(), out); });
    }
  }
}

// Moments of queries whose mean is about `offset` times their spread. chunks: queries of each call.
template <class Place>
void check_moments(Place& place, RandomCache& c, const PagedKv& kv, const PagedKv& there, float offset,
                   const std::vector<int>& chunks) {
  CAPTURE(offset, chunks);
  const std::int64_t dim = kv.head_dim, heads = c.heads(), floats = ops::moment_floats(dim);
  const Stream s = place.stream();
  std::vector<float> zeros(static_cast<std::size_t>(kv.table.extent[0] * heads * floats));
  const auto wanted = View<float, 3>::dense(zeros.data(), {kv.table.extent[0], heads, floats});
  const auto got = place.put(wanted);
  std::vector<std::int32_t> seen(static_cast<std::size_t>(c.rows()));
  for (const int n : chunks) {
    for (std::size_t r = 0; r < seen.size(); ++r) seen[r] += n + (seen[r] == 0 ? static_cast<int>(r) * 3 : 0);
    Numbers<4> queries(c, {c.rows(), heads, n, dim});
    for (std::int64_t r = 0; r < c.rows(); ++r)
      for (std::int64_t h = 0; h < heads; ++h)
        for (std::int64_t i = 0; i < n; ++i) {
          float* x = &queries.own()(r, h, i, 0);
          for (std::int64_t d = 0; d < dim; ++d) x[d] += offset * static_cast<float>(1 + h + d % 3);
          ops::rotate_reference(x, kv.rope_table, seen[static_cast<std::size_t>(r)] - n + i);
        }
    const auto counts = View<std::int32_t, 1>::dense(seen.data(), {c.rows()});
    const auto* seen_there = place.put(counts).data;
    ops::add_moments(Tensor<4>(place.put(queries.view())), seen_there, there, 4, got, s);
    ops::add_moments_reference(queries.view(), seen.data(), kv, 4, wanted);
    // A sum adds a product for each query, and f32 rounds each. Larger queries are rounded more.
    const double queries_seen = *std::max_element(seen.begin(), seen.end());
    CHECK(Tolerance::worst(place.get(got), zeros) <= 1e-5 * queries_seen * (1 + offset));
    for (const int horizon : {1, 70}) {
      CAPTURE(horizon);
      const Guarded<3> mean({c.rows(), heads, dim});
      const Guarded<4> covariance({c.rows(), heads, dim, dim});
      const auto mean_there = place.put(mean.view());
      same<Place, 4>(
          place, "expected_query", covariance.view(), 1e-4 * (1 + offset),
          [&](View<float, 4> out) { ops::expected_query(got, seen_there, there, horizon, mean_there, out, s); },
          [&](View<float, 4> out) {
            ops::expected_query_reference(wanted, seen.data(), kv, horizon, mean.view(), out);
          });
      CHECK(Tolerance::worst(place.get(mean_there), mean.values()) <= 1e-5 * (1 + offset));
    }
  }
}

// Heads with more tokens than one block reads, or one turn of a block.
template <class Place>
void check_long_heads() {
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  PagedFixture cache({1, 2, 16, 16, 80});
  cache.fill_random(0, 0, 1250, rng), cache.fill_random(0, 1, 300, rng);
  Place place;
  const PagedKv kv = cache.view(), there = place.put(kv, cache.arena_bytes());
  const Stream s = place.stream();
  std::vector<float> values(2 * 1250);
  for (float& x : values) x = 3 * normal(rng);
  const auto scores = View<float, 3>::dense(values.data(), {1, 2, 1250});
  same<Place, 3>(
      place, "softmax", scores, 1e-5, [&](Scores out) { ops::softmax(there, out, 1, s); },
      [&](Scores out) { ops::softmax_reference(kv, out, 1); });
  same<Place, 3>(
      place, "normalised_mean", Guarded<3>({1, 2, 16}).view(), 2e-6,
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
  same<Place, 4>(
      place, "read_rows", Guarded<4>({1, 2, 1250, 16}).view(), 2e-6,
      [&](View<float, 4> out) {
        ops::read_rows({&there, KvSide::value}, out, s);
      },
      [&](View<float, 4> out) {
        ops::read_rows_reference({&kv, KvSide::value}, out);
      });
  same<Place, 3>(
      place, "row_dot", per_token.view(), Tolerance{}.score,
      [&](Scores out) {
        ops::row_dot({&there, KvSide::key}, vector_there, out, s);
      },
      [&](Scores out) {
        ops::row_dot_reference({&kv, KvSide::key}, vector, false, out);
      });
  same<Place, 3>(
      place, "row_quadratic", per_token.view(), 1e-4,
      [&](Scores out) {
        ops::row_quadratic({&there, KvSide::key}, matrix_there, out, s);
      },
      [&](Scores out) {
        ops::row_quadratic_reference({&kv, KvSide::key}, matrix, out);
      });
  const auto in = place.put(View<const float, 3>(scores));
  same<Place, 3>(
      place, "layer_reduce", Guarded<3>({1, 2, 1250}).view(), 1e-5,
      [&](Scores out) { ops::layer_reduce(there, in, GroupRule::mean, out, s); },
      [&](Scores out) { ops::layer_reduce_reference(kv, scores, GroupRule::mean, out); });
}

// Runs the cases on the n-th RandomCache. The references work on its twin.
template <class Place>
void check_scores(unsigned n) {
  CAPTURE(n);
  RandomCache c(n), twin(n);
  Place place;
  const PagedKv kv = twin.cache.view(), there = place.put(c.cache.view(), c.cache.arena_bytes());
  check_combine(place, c);
  check_scores_of_tokens(place, c, kv, there);
  check_rows(place, c, kv, there);
  const std::vector<int> chunks{5 + c.pick({0, 40, 90}), 1 + c.pick({0, 30})};
  check_moments(place, c, kv, there, 0, chunks);
  if (n % 4 == 0) check_moments(place, c, kv, there, 30, chunks);
  if (n == 15) check_moments(place, c, kv, there, 0, {1100, 2});  // more queries than one block sums
  CHECK(c.cache.guards_intact());
}

}  // namespace kvlab::test
