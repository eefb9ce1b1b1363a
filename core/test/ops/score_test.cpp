#include <kvlab/ops.hpp>

#include <omp.h>

#include <catch2/catch.hpp>
#include <cmath>

#include "support/paged_fixture.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

Stream cpu() { return Stream::cpu(); }

// A cache of one head with `tokens` tokens whose key is (value, 0, 0, ...).
PagedFixture one_head(int tokens, const PagedOptions& options = {1, 1, 8, 4, 16}) {
  PagedFixture cache(options);
  for (int t = 0; t < tokens; ++t)
    cache.append(0, 0, std::vector<float>(options.head_dim, 0.f), std::vector<float>(options.head_dim, 0.f));
  return cache;
}

std::vector<float> pooled(std::vector<float> votes, Pooling kind, int kernel, int excluded) {
  PagedFixture cache = one_head(static_cast<int>(votes.size()));
  HeapWorkspace w;
  ops::pool(cache.view(), View<float, 3>::dense(votes.data(), {1, 1, static_cast<std::int64_t>(votes.size())}), kind,
            kernel, excluded, w, cpu());
  return votes;
}

void check_close(const std::vector<float>& got, const std::vector<double>& wanted, double margin) {
  REQUIRE(got.size() == wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) CHECK(got[i] == Approx(wanted[i]).margin(margin));
}

// votes of window_votes in plain double loops over the gathered keys.
std::vector<double> plain_votes(const View<const float, 4>& q, int last, const PagedKv& kv, int row, int query_head) {
  const int group = static_cast<int>(q.extent[1]) / kv.kv_heads, head = query_head / group, n = kv.tokens(row, head);
  const int window = static_cast<int>(q.extent[2]);
  std::vector<float> keys(std::size_t(n) * kv.head_dim);
  std::vector<std::int32_t> position(n);
  ops::gather_rows(kv, row, head, KvSide::key, n, keys.data());
  ops::token_positions(kv, row, head, n, position.data());
  std::vector<double> votes(n, 0.0);
  for (int i = 0; i < window; ++i) {
    std::vector<double> p(n, 0.0);
    double total = 0;
    for (int t = 0; t < n; ++t) {
      if (position[t] > last - (window - 1) + i) continue;
      double s = 0;
      for (int d = 0; d < kv.head_dim; ++d)
        s += double(q(row, query_head, i, d)) * keys[std::size_t(t) * kv.head_dim + d];
      total += p[t] = std::exp(s / std::sqrt(double(kv.head_dim)));
    }
    for (int t = 0; t < n && total > 0; ++t) votes[t] += p[t] / total;
  }
  return votes;
}

}  // namespace

TEST_CASE("pool: SnapKV's rows by hand") {
  const std::vector<float> votes = {.5f, 0, 0, .3f, .3f, 0, 0};
  check_close(pooled(votes, Pooling::average, 3, 0), {.5 / 3, .5 / 3, .1, .2, .2, .1, 0}, 1e-6);
  check_close(pooled(votes, Pooling::max, 3, 0), {.5, .5, .3, .3, .3, .3, 0}, 0);
  check_close(pooled(votes, Pooling::none, 3, 0), {.5, 0, 0, .3, .3, 0, 0}, 0);
  // The two newest stay as they are and are not looked at.
  check_close(pooled({1, 0, 0, 9, 9}, Pooling::max, 3, 2), {1, 1, 0, 9, 9}, 0);
  check_close(pooled({3, 0, 0, 9, 9}, Pooling::average, 5, 2), {.6, .6, .6, 9, 9}, 1e-6);
  check_close(pooled({-1, -2}, Pooling::max, 7, 0), {-1, -1}, 0);  // pads are -inf, not 0
  check_close(pooled({4}, Pooling::max, 3, 5), {4}, 0);
  CHECK_THROWS_AS(pooled(votes, Pooling::max, 4, 0), Error);
}

TEST_CASE("group_reduce: the four rules by hand") {
  PagedFixture cache = one_head(2);
  std::vector<float> in = {0, std::log(3.f), 2, 2};  // two query heads, two tokens
  const auto reduce = [&](GroupRule rule) {
    Guarded<3> out({1, 1, 2});
    ops::group_reduce(cache.view(), View<float, 3>::dense(in.data(), {1, 2, 2}), rule, out.view(), cpu());
    CHECK(out.margins_intact());
    return out.values();
  };
  check_close(reduce(GroupRule::mean), {1, (2 + std::log(3.0)) / 2}, 1e-6);
  check_close(reduce(GroupRule::max), {2, 2}, 0);
  check_close(reduce(GroupRule::sum), {2, 2 + std::log(3.0)}, 1e-6);
  check_close(reduce(GroupRule::softmax_mean), {(0.25 + 0.5) / 2, (0.75 + 0.5) / 2}, 1e-6);
}

TEST_CASE("add_mass and read_state: H2O's column sums by hand") {
  PagedFixture cache = one_head(5, {1, 1, 8, 4, 16, DType::f32, {}, 2});
  const PagedKv kv = cache.view();
  const std::vector<std::vector<float>> rows = {
      {1, 0, 0, 0, 0}, {.6f, .4f, 0, 0, 0}, {.5f, .3f, .2f, 0, 0}, {.4f, .1f, .4f, .1f, 0}, {.3f, .1f, .2f, .2f, .2f}};
  for (const auto& row : rows)
    ops::add_mass(View<const float, 3>::dense(row.data(), {1, 1, 5}), GroupRule::mean, {&kv, 1}, cpu());
  Guarded<3> out({1, 1, 5}), other({1, 1, 5});
  ops::read_state({&kv, 1}, out.view(), cpu());
  check_close(out.values(), {2.8, 0.9, 0.8, 0.3, 0.2}, 1e-6);
  ops::read_state({&kv, 0}, other.view(), cpu());
  check_close(other.values(), {0, 0, 0, 0, 0}, 0);
  CHECK(cache.guards_intact());
  CHECK_THROWS_AS(ops::read_state({&kv, 2}, out.view(), cpu()), Error);
  const std::vector<float> two = {1, 0, 0, 0, 0, 3, 0, 0, 0, 0};  // two query heads
  ops::add_mass(View<const float, 3>::dense(two.data(), {1, 2, 5}), GroupRule::max, {&kv, 0}, cpu());
  ops::add_mass(View<const float, 3>::dense(two.data(), {1, 2, 5}), GroupRule::mean, {&kv, 0}, cpu());
  ops::read_state({&kv, 0}, other.view(), cpu());
  check_close(other.values(), {5, 0, 0, 0, 0}, 1e-6);
}

TEST_CASE("row_norm, negate, recency") {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    PagedFixture cache({1, 1, 8, 2, 16, dtype});
    const float norms[] = {1, 5, 2, .5f};
    for (int t = 0; t < 4; ++t) {
      std::vector<float> k(8, 0.f), v(8, 0.f);
      k[t] = 0.6f * norms[t];
      k[7] = 0.8f * norms[t];
      v[0] = 3;
      v[1] = 4;
      cache.append(0, 0, k, v, 10 * t);
    }
    const PagedKv kv = cache.view();
    Guarded<3> out({1, 1, 4});
    ops::row_norm({&kv, KvSide::key}, out.view(), cpu());
    check_close(out.values(), {1, 5, 2, .5}, dtype == DType::f32 ? 1e-6 : 2e-2);
    ops::row_norm({&kv, KvSide::value}, out.view(), cpu());
    check_close(out.values(), {5, 5, 5, 5}, 1e-6);
    ops::negate(out.view(), cpu());
    CHECK(out(0, 0, 2) == -5);
    ops::recency(kv, out.view(), cpu());
    check_close(out.values(), {0, 10, 20, 30}, 0);
    Guarded<3> small({1, 1, 3});
    CHECK_THROWS_AS(ops::row_norm({&kv, KvSide::key}, small.view(), cpu()), Error);
    cache.unmap(0, 0, 1);
    CHECK_THROWS_AS(ops::row_norm({&kv, KvSide::key}, out.view(), cpu()), Error);
  }
}

TEST_CASE("row_norm on ragged caches equals plain loops, for every storage") {
  std::mt19937 rng(4);
  for (const int storage : {0, 1, 2}) {
    PagedOptions o{3, 2, 80, 8, 40, storage ? DType::bf16 : DType::f32};
    if (storage == 2) o.codec = {{8}, {8}};
    PagedFixture cache(o);
    const int lengths[] = {0, 1, 300, 8, 77, 16};
    for (int r = 0; r < 3; ++r)
      for (int h = 0; h < 2; ++h) cache.fill_random(r, h, lengths[r * 2 + h], rng);
    const PagedKv kv = cache.view();
    Guarded<3> out({3, 2, 310});
    ops::row_norm({&kv, KvSide::key}, out.view(), cpu());
    for (int r = 0; r < 3; ++r)
      for (int h = 0; h < 2; ++h) {
        const int n = kv.tokens(r, h);
        std::vector<float> keys(std::size_t(n) * 80);
        ops::gather_rows(kv, r, h, KvSide::key, n, keys.data());
        for (int t = 0; t < n; ++t) {
          double s = 0;
          for (int d = 0; d < 80; ++d) s += double(keys[t * 80 + d]) * keys[t * 80 + d];
          REQUIRE(out(r, h, t) == Approx(std::sqrt(s)).epsilon(1e-5));
        }
        for (int t = n; t < 310; ++t) REQUIRE(out(r, h, t) == Guarded<3>::poison);
      }
  }
}

TEST_CASE("window_votes: two window queries by hand") {
  // Keys: token t has k[0] = s_t; query (sqrt(8), 0, ...): scores s_t. Query 0 sees tokens 0, 1; query 1 all three.
  PagedFixture cache({1, 1, 8, 4, 16});
  for (const float score : {0.f, std::log(3.f), std::log(4.f)}) {
    std::vector<float> k(8, 0.f);
    k[0] = score;
    cache.append(0, 0, k, k);
  }
  std::vector<float> q(16, 0.f);
  q[0] = q[8] = std::sqrt(8.f);
  const std::int32_t seen = 3;
  Guarded<3> votes({1, 1, 3});
  ops::window_votes(View<const float, 4>::dense(q.data(), {1, 1, 2, 8}), &seen, cache.view(), votes.view(), cpu());
  check_close(votes.values(), {1. / 4 + 1. / 8, 3. / 4 + 3. / 8, 4. / 8}, 1e-6);
}

TEST_CASE("window_votes equals plain loops on ragged caches; threads change nothing") {
  std::mt19937 rng(6);
  std::normal_distribution<float> normal;
  int trial = 0;
  for (const int dim : {16, 64, 80})
    for (const int storage : {0, 1, 2})
      for (const int group : {1, 3}) {
        PagedOptions o{2, 2, dim, trial % 2 ? 16 : 4, 80, storage ? DType::bf16 : DType::f32};
        if (storage == 2) o.codec = {{8}, {0}};
        if (trial++ % 4 == 3) o.rope = RopeRegime::cache_relative;
        PagedFixture cache(o);
        const int lengths[] = {150, 17, 0, 3};  // the last is shorter than the window
        for (int r = 0; r < 2; ++r)
          for (int h = 0; h < 2; ++h) cache.fill_random(r, h, lengths[r * 2 + h], rng);
        const int window = 5, heads = 2 * group;
        std::vector<float> q(std::size_t(2) * heads * window * dim);
        for (float& x : q) x = normal(rng);
        const auto queries = View<const float, 4>::dense(q.data(), {2, heads, window, dim});
        const std::int32_t seen[] = {150, 3};
        Guarded<3> votes({2, heads, 151}), again({2, heads, 151});
        ops::window_votes(queries, seen, cache.view(), votes.view(), cpu());
        omp_set_num_threads(1);
        ops::window_votes(queries, seen, cache.view(), again.view(), cpu());
        omp_set_num_threads(2);
        CHECK(votes.values() == again.values());
        CHECK(votes.margins_intact());
        for (int r = 0; r < 2; ++r)
          for (int h = 0; h < heads; ++h) {
            const auto wanted = plain_votes(queries, seen[r] - 1, cache.view(), r, h);
            for (std::size_t t = 0; t < wanted.size(); ++t)
              REQUIRE(votes(r, h, t) == Approx(wanted[t]).margin(5 * Tolerance{}.probability));
            REQUIRE(votes(r, h, 150) == Guarded<3>::poison);
          }
      }
}

TEST_CASE("page_score: Quest's boxes by hand, every group rule, means") {
  // One page, box m = (-1, -2), M = (5, 4) and zeros elsewhere.
  PagedFixture cache = one_head(4);
  std::vector<float> box(16, 0.f);
  box[0] = -1;
  box[1] = -2;
  box[8] = 5;
  box[9] = 4;
  Summaries s{Summary::min_max, DType::f32, reinterpret_cast<const std::byte*>(box.data()), 64, 64, 64};
  const auto score = [&](std::vector<float> q, int heads, GroupRule rule) {
    Guarded<3> out({1, 1, 1});
    ops::page_score(View<const float, 3>::dense(q.data(), {1, heads, 8}), cache.view(), s, rule, 1.f, out.view(),
                    cpu());
    return out(0, 0, 0);
  };
  CHECK(score({1, -1, 0, 0, 0, 0, 0, 0}, 1, GroupRule::max) == 7);
  CHECK(score({-1, -1, 0, 0, 0, 0, 0, 0}, 1, GroupRule::max) == 3);
  CHECK(score({0, 0, 0, 0, 0, 0, 0, 0}, 1, GroupRule::max) == 0);
  const std::vector<float> two = {1, -1, 0, 0, 0, 0, 0, 0, -1, -1, 0, 0, 0, 0, 0, 0};
  CHECK(score(two, 2, GroupRule::max) == 7);
  CHECK(score(two, 2, GroupRule::mean) == 5);
  CHECK(score(two, 2, GroupRule::sum) == 10);
  CHECK(score(two, 2, GroupRule::softmax_mean) == Approx(1));  // a single page takes all
  s.kind = Summary::mean;
  CHECK(score({2, -1, 0, 0, 0, 0, 0, 0}, 1, GroupRule::max) == 0);  // 2 * -1 - 1 * -2
}

TEST_CASE("page_score bounds every key of its page, and only softmax_mean scales") {
  std::mt19937 rng(9);
  std::normal_distribution<float> normal;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    PagedOptions o{2, 2, 64, 8, 20, dtype};
    PagedFixture cache(o);
    const int lengths[] = {100, 7, 64, 1};
    for (int r = 0; r < 2; ++r)
      for (int h = 0; h < 2; ++h) cache.fill_random(r, h, lengths[r * 2 + h], rng);
    const PagedKv kv = cache.view();
    const std::int64_t page_bytes = 2 * 64 * static_cast<std::int64_t>(size_of(dtype));
    std::vector<std::byte> data(2 * 2 * 20 * page_bytes);
    for (int r = 0; r < 2; ++r)
      for (int h = 0; h < 2; ++h)
        for (int p = 0; p < kv.pages(r, h); ++p)
          ops::summarize_page(kv.frame(kv.entry(r, h, p)), kv.layout(kv.entry(r, h, p)),
                              std::min(8, kv.tokens(r, h) - 8 * p), Summary::min_max, dtype,
                              data.data() + ((kv.slots[r] * 2 + h) * 20 + p) * page_bytes);
    const Summaries s{Summary::min_max, dtype, data.data(), 40 * page_bytes, 20 * page_bytes, page_bytes};
    std::vector<float> q(2 * 6 * 64);
    for (float& x : q) x = normal(rng);
    const auto queries = View<const float, 3>::dense(q.data(), {2, 6, 64});
    Guarded<3> best({2, 2, 14}), soft({2, 2, 14});
    ops::page_score(queries, kv, s, GroupRule::max, 9.f, best.view(), cpu());
    ops::page_score(queries, kv, s, GroupRule::softmax_mean, 0.125f, soft.view(), cpu());
    CHECK(best.margins_intact());
    for (int r = 0; r < 2; ++r)
      for (int h = 0; h < 2; ++h) {
        const int n = kv.tokens(r, h), pages = kv.pages(r, h);
        std::vector<float> keys(n * 64);
        ops::gather_rows(kv, r, h, KvSide::key, n, keys.data());
        std::vector<double> bound(3 * pages, 0.0), share(pages, 0.0);
        for (int g = 0; g < 3; ++g) {
          double total = 0;
          for (int p = 0; p < pages; ++p) {
            for (int d = 0; d < 64; ++d) {
              double most = -1e30;
              for (int t = p * 8; t < std::min(n, p * 8 + 8); ++t)
                most = std::max(most, double(queries(r, h * 3 + g, d)) * keys[t * 64 + d]);
              bound[g * pages + p] += most;
            }
            total += std::exp(bound[g * pages + p] / 8);
          }
          for (int p = 0; p < pages; ++p) share[p] += std::exp(bound[g * pages + p] / 8) / total / 3;
        }
        for (int p = 0; p < pages; ++p) {
          const double most = std::max({bound[p], bound[pages + p], bound[2 * pages + p]});
          REQUIRE(best(r, h, p) == Approx(most).margin(Tolerance{}.score));
          REQUIRE(soft(r, h, p) == Approx(share[p]).margin(Tolerance{}.probability));
        }
        for (int p = pages; p < 14; ++p) REQUIRE(best(r, h, p) == Guarded<3>::poison);
      }
  }
}
