#include <kvlab/query_shares.hpp>

#include <catch2/catch.hpp>
#include <cmath>

#include "cases/paged_fixture.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

// A head whose token t the query (sqrt(8), 0, ...) scores with scores[t].
PagedFixture scored(const std::vector<float>& scores) {
  PagedFixture cache({1, 1, 8, 4, 16});
  for (const float score : scores) {
    std::vector<float> k(8, 0.f);
    k[0] = score;
    cache.append(0, 0, k, k);
  }
  return cache;
}

// Queries [1, head, query, 8] that score a token with the factor times its score.
std::vector<float> queries_of(const std::vector<float>& factors) {
  std::vector<float> q(factors.size() * 8, 0.f);
  for (std::size_t i = 0; i < factors.size(); ++i) q[8 * i] = factors[i] * std::sqrt(8.f);
  return q;
}

void check_rule(PagedFixture& cache, const std::vector<float>& factors, int heads, const QueryShares& how,
                const std::vector<double>& wanted) {
  const auto q = queries_of(factors);
  const std::int64_t queries = static_cast<std::int64_t>(factors.size()) / heads;
  const Guarded<3> out({1, 1, static_cast<std::int64_t>(wanted.size())});
  ops::query_shares(View<const float, 4>::dense(q.data(), {1, heads, queries, 8}), cache.view(), how, out.view(),
                    Stream::cpu());
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    CAPTURE(i);
    CHECK(out.values()[i] == Approx(wanted[i]).margin(1e-6));
  }
}

}  // namespace

TEST_CASE("query_shares: two queries by hand, by every rule") {
  // Query 0 sees tokens 0 and 1, query 1 sees all: shares of 1/4 and 3/4, then of 1/8, 3/8 and 4/8.
  PagedFixture cache = scored({0.f, std::log(3.f), std::log(4.f)});
  const std::int32_t seen = 3, older = 2;
  QueryShares how;
  how.seen = &seen;
  check_rule(cache, {1, 1}, 1, how, {3. / 8, 9. / 8, 4. / 8});
  how.rule = ShareRule::max;
  check_rule(cache, {1, 1}, 1, how, {1. / 4, 3. / 4, 4. / 8});
  // The limits are 1/2 and 1/3. A token that a query does not see is not below.
  for (const ShareRule rule : {ShareRule::below_mean, ShareRule::below_each}) {
    how.rule = rule;
    check_rule(cache, {1, 1}, 1, how, {2, 0, 0});
    check_rule(cache, {0, 0}, 1, how, {0, 0, 0});  // a share of 1 / tokens is not below
  }
  how = {};
  check_rule(cache, {1, 1}, 1, how, {2. / 8, 6. / 8, 8. / 8});
  how.seen = &older, how.alike = true;
  check_rule(cache, {1, 1}, 1, how, {2. / 4, 6. / 4, 0});
  const std::int32_t none = 1;
  how.seen = &none, how.alike = false;  // query 0 sees nothing
  check_rule(cache, {1, 1}, 1, how, {1, 0, 0});
}

TEST_CASE("query_shares: the mean of a group counts, or each head") {
  // Heads give shares of 1/4 and 3/4, and the reverse; then of 1/4 and 3/4, and of 1/10 and 9/10.
  PagedFixture cache = scored({0.f, std::log(3.f)});
  QueryShares how;
  how.rule = ShareRule::below_mean;
  check_rule(cache, {1, -1}, 2, how, {0, 0});
  check_rule(cache, {1, 2}, 2, how, {1, 0});
  how.rule = ShareRule::below_each;
  check_rule(cache, {1, -1}, 2, how, {1, 1});
  check_rule(cache, {1, 2}, 2, how, {2, 0});
}

TEST_CASE("query_shares: temperature and noise by hand") {
  const float two = 2;
  QueryShares how;
  how.temperature = &two;
  PagedFixture cache = scored({0.f, std::log(9.f), std::log(16.f)}), alike = scored({0, 0, 0});
  check_rule(cache, {1}, 1, how, {1. / 8, 3. / 8, 4. / 8});
  // Number 0 of the sequence that starts at this key is 1234567. Vigna's published numbers of that seed follow. Noise
  // of -ln(-ln u) on equal logits gives shares in proportion to 1 / -ln u, and to its root at temperature 2.
  const std::uint64_t key = 0xa53c84059609e98eull;
  std::vector<double> wanted, roots;
  double sum = 0, sum_of_roots = 0;
  for (const std::uint64_t n : {6457827717110365317ull, 3203168211198807973ull, 9817491932198370423ull}) {
    wanted.push_back(-1 / std::log(std::ldexp(static_cast<double>(n >> 40), -24)));
    roots.push_back(std::sqrt(wanted.back()));
    sum += wanted.back(), sum_of_roots += roots.back();
  }
  for (double& x : wanted) x /= sum;
  for (double& x : roots) x /= sum_of_roots;
  how.noise = &key;
  check_rule(alike, {1}, 1, how, roots);
  how.temperature = nullptr;
  check_rule(alike, {1}, 1, how, wanted);
}

TEST_CASE("query_shares refuses views that do not fit") {
  PagedFixture cache = scored({0, 0, 0});
  const auto q = queries_of({1, 1, 1});
  const auto refused = [&](View<const float, 4> queries, std::array<std::int64_t, 3> extent) {
    const Guarded<3> out(extent);
    CHECK_THROWS_AS(ops::query_shares(queries, cache.view(), {}, out.view(), Stream::cpu()), Error);
  };
  const auto whole = View<const float, 4>::dense(q.data(), {1, 1, 3, 8});
  refused(whole, {1, 1, 2});
  refused(whole, {1, 2, 3});
  refused(View<const float, 4>::dense(q.data(), {1, 1, 6, 4}), {1, 1, 3});
  refused({q.data(), {1, 1, 1, 8}, {24, 24, 24, 2}}, {1, 1, 3});
}
