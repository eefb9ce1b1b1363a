#include <kvlab/ops.hpp>

#include <omp.h>

#include <catch2/catch.hpp>
#include <cmath>

#include "cases/paged_fixture.hpp"
#include "ops/page/reference.hpp"

using namespace kvlab;
using namespace kvlab::cases;

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

}  // namespace

TEST_CASE("pool: SnapKV's rows by hand") {
  const std::vector<float> votes = {.5f, 0, 0, .3f, .3f, 0, 0};
  check_close(pooled(votes, Pooling::average, 3, 0), {.5 / 3, .5 / 3, .1, .2, .2, .1, 0}, 1e-6);
  check_close(pooled(votes, Pooling::max, 3, 0), {.5, .5, .3, .3, .3, .3, 0}, 0);
  check_close(pooled(votes, Pooling::none, 3, 0), {.5, 0, 0, .3, .3, 0, 0}, 0);
  // The two newest tokens keep their scores and do not enter the pooling of others.
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
    ops::group_reduce(cache.view(), View<const float, 3>::dense(in.data(), {1, 2, 2}), rule, out.view(), cpu());
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

TEST_CASE("random_scores: published numbers of SplitMix64, whatever a token's place") {
  PagedFixture cache({1, 1, 8, 2, 16});
  const std::vector<float> zeros(8, 0.f);
  for (const int position : {4, 0, 2, 1, 3}) cache.append(0, 0, zeros, zeros, position);
  const PagedKv kv = cache.view();
  // Number 0 of the sequence that starts at this key is 1234567. Vigna's published numbers of that seed follow.
  const std::uint64_t key = 0xa53c84059609e98eull;
  const std::uint64_t published[] = {6457827717110365317ull, 3203168211198807973ull, 9817491932198370423ull,
                                     4593380528125082431ull, 16408922859458223821ull};
  const Guarded<3> out({1, 1, 5});
  ops::random_scores(kv, &key, out.view(), cpu());
  int place = 0;
  for (const int position : {4, 0, 2, 1, 3}) {
    const float wanted = static_cast<float>(std::ldexp(static_cast<double>(published[position] >> 40), -24));
    CHECK(out(0, 0, place++) == wanted);
  }
  CHECK_THROWS_AS(ops::random_scores(kv, nullptr, out.view(), cpu()), Error);
  const Guarded<3> small({1, 1, 4});
  CHECK_THROWS_AS(ops::random_scores(kv, &key, small.view(), cpu()), Error);
  cache.unmap(0, 0, 1);
  CHECK_THROWS_AS(ops::random_scores(kv, &key, out.view(), cpu()), Error);
}

TEST_CASE("window_votes: two window queries by hand") {
  // Key of token t: k[0] = s_t. The query (sqrt(8), 0, ...) scores it s_t. Query 0 sees tokens 0 and 1, query 1 all.
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

TEST_CASE("window_votes: queries vote for the newest tokens that they see") {
  // The shares of the case above: query 0 gives 1/4 and 3/4, query 1 gives 1/8, 3/8 and 4/8.
  PagedFixture cache({1, 1, 8, 4, 16});
  for (const float score : {0.f, std::log(3.f), std::log(4.f)}) {
    std::vector<float> k(8, 0.f);
    k[0] = score;
    cache.append(0, 0, k, k);
  }
  std::vector<float> q(16, 0.f);
  q[0] = q[8] = std::sqrt(8.f);
  const auto queries = View<const float, 4>::dense(q.data(), {1, 1, 2, 8});
  const std::int32_t seen = 3;
  Guarded<3> votes({1, 1, 3});
  ops::window_votes(queries, &seen, cache.view(), votes.view(), cpu(), {}, 1);
  check_close(votes.values(), {0, 3. / 4, 4. / 8}, 1e-6);
  ops::window_votes(queries, &seen, cache.view(), votes.view(), cpu(), {}, 2);
  check_close(votes.values(), {1. / 4, 3. / 4 + 3. / 8, 4. / 8}, 1e-6);
  CHECK_THROWS_WITH(ops::window_votes(queries, nullptr, cache.view(), votes.view(), cpu(), {}, 1),
                    Catch::Contains("wanted the numbers of tokens seen"));
}

TEST_CASE("query_counts: of the last queries, those at or behind a token") {
  PagedFixture cache({1, 1, 8, 4, 16});
  for (const int position : {0, 3, 7, 8}) cache.append(0, 0, std::vector<float>(8), std::vector<float>(8), position);
  const std::int32_t seen = 8;  // the newest query stands at 7
  Guarded<3> out({1, 1, 4});
  ops::query_counts(cache.view(), &seen, 3, out.view(), cpu());
  check_close(out.values(), {3, 3, 1, 0}, 0);
  ops::query_counts(cache.view(), &seen, 100, out.view(), cpu());
  check_close(out.values(), {8, 5, 1, 0}, 0);
}

TEST_CASE("window_votes: the greatest share of a group's query heads, for each query by itself") {
  // Of two query heads, head 0 scores token t with s_t in query 0 and with 0 in query 1. Head 1 does the reverse.
  PagedFixture cache({1, 1, 8, 4, 16});
  for (const float score : {0.f, std::log(3.f)}) {
    std::vector<float> k(8, 0.f);
    k[0] = score;
    cache.append(0, 0, k, k);
  }
  std::vector<float> q(32, 0.f);
  q[0] = q[24] = std::sqrt(8.f);
  const auto queries = View<const float, 4>::dense(q.data(), {1, 2, 2, 8});
  Guarded<3> each({1, 2, 2}), group({1, 1, 2});
  ops::window_votes(queries, nullptr, cache.view(), each.view(), cpu());
  check_close(each.values(), {3. / 4, 5. / 4, 3. / 4, 5. / 4}, 1e-6);  // the greatest sums
  ops::window_votes(queries, nullptr, cache.view(), group.view(), cpu());
  check_close(group.values(), {1, 6. / 4}, 1e-6);
  Guarded<3> wrong({1, 3, 2});
  CHECK_THROWS_AS(ops::window_votes(queries, nullptr, cache.view(), wrong.view(), cpu()), Error);
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
  box[0] = 0, box[1] = -1, box[8] = 4, box[9] = 3;             // ArkVale's box of the same keys
  s.kind = Summary::centre_radius;
  CHECK(score({1, -1, 0, 0, 0, 0, 0, 0}, 1, GroupRule::max) == 5);
  box[0] = -1, box[1] = -2;
  s.kind = Summary::mean;
  CHECK(score({2, -1, 0, 0, 0, 0, 0, 0}, 1, GroupRule::max) == 0);  // 2 * -1 - 1 * -2
}

TEST_CASE("window_votes: threads change nothing") {
  for (unsigned n = 0; n < 36; ++n) {
    CAPTURE(n);
    RandomCache c(n);
    const int window = 1 + static_cast<int>(n % 9), dim = c.cache.options().head_dim;
    const auto q = c.normal(std::int64_t{c.rows()} * c.heads() * window * dim);
    const auto queries = View<const float, 4>::dense(q.data(), {c.rows(), c.heads(), window, dim});
    std::vector<std::int32_t> seen;
    for (int r = 0; r < c.rows(); ++r) seen.push_back(3 * c.cache.view().tokens(r, 0) + 1);
    const auto votes = [&](int threads) {
      Guarded<3> out({c.rows(), c.heads(), c.room()});
      omp_set_num_threads(threads);
      ops::window_votes(queries, seen.data(), c.cache.view(), out.view(), cpu());
      omp_set_num_threads(2);
      return out.values();
    };
    CHECK(votes(1) == votes(2));
  }
}

TEST_CASE("page_score bounds every key of its page, by numbers and by codes") {
  const int bits = GENERATE(16, 8);
  CAPTURE(bits);
  RandomCache c(0);  // f32
  const PagedKv kv = c.cache.view();
  const auto& o = c.cache.options();
  const auto q = c.normal(std::int64_t{c.rows()} * c.heads() * o.head_dim);
  const auto queries = View<const float, 3>::dense(q.data(), {c.rows(), c.heads(), o.head_dim});
  const std::int64_t bytes = summary_bytes(Summary::min_max, bits, DType::f32, o.head_dim);
  std::vector<float> data(std::size_t(o.rows) * o.kv_heads * o.max_pages * bytes / sizeof(float));
  const Summaries s{Summary::min_max,
                    DType::f32,
                    reinterpret_cast<const std::byte*>(data.data()),
                    o.kv_heads * o.max_pages * bytes,
                    o.max_pages * bytes,
                    bytes,
                    bits};
  for (int r = 0; r < o.rows; ++r)
    for (int h = 0; h < o.kv_heads; ++h)
      for (int p = 0; p < kv.pages(r, h); ++p)
        ops::summarize_page(kv.frame(kv.entry(r, h, p)), kv.layout(kv.entry(r, h, p)), kv.entry(r, h, p).tokens,
                            Summary::min_max, DType::f32, const_cast<std::byte*>(s.at(kv.slots[r], h, p)), bits);
  Guarded<3> bound({c.rows(), c.kv_heads(), o.max_pages});
  ops::page_score(queries, kv, s, GroupRule::max, 1.f, bound.view(), cpu());
  for (int r = 0; r < o.rows; ++r)
    for (int h = 0; h < o.kv_heads; ++h) {
      std::vector<float> keys(std::size_t(kv.tokens(r, h)) * o.head_dim);
      ops::gather_rows_reference(kv, r, h, KvSide::key, kv.tokens(r, h), keys.data());
      for (int t = 0; t < kv.tokens(r, h); ++t)
        for (int g = 0; g < c.group; ++g) {
          double dot = 0;
          for (int d = 0; d < o.head_dim; ++d)
            dot += double{queries(r, h * c.group + g, d)} * keys[std::size_t(t) * o.head_dim + d];
          REQUIRE(bound(r, h, t / o.page_size) >= dot - Tolerance{}.score);
        }
    }
}
