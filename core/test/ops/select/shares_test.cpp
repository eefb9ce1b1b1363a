// Sums of heads, tokens of a share and listed tokens, by hand.
#include <kvlab/ops.hpp>

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

#include "cases/paged_fixture.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

// A cache of one head that holds this many tokens, with scores of them.
struct Head {
  PagedFixture cache{{1, 1, 8, 4, 4}};
  std::vector<float> scores;
  explicit Head(std::vector<float> of) : scores(std::move(of)) {
    for (std::size_t t = 0; t < scores.size(); ++t) cache.append(0, 0, std::vector<float>(8), std::vector<float>(8));
    scores.push_back(1e30f);  // past the head's length
  }
  View<float, 3> view() {
    return View<float, 3>::dense(scores.data(), {1, 1, static_cast<std::int64_t>(scores.size())});
  }
  float tokens_of(float share, Pins pins = {}) {
    float n = -1;
    ops::tokens_of_share(cache.view(), view(), share, pins, View<float, 2>::dense(&n, {1, 1}), Stream::cpu());
    return n;
  }
  float sum(Pins pins = {}) {
    float x = -1;
    ops::head_sum(cache.view(), view(), pins, View<float, 2>::dense(&x, {1, 1}), Stream::cpu());
    return x;
  }
};

}  // namespace

TEST_CASE("tokens_of_share by hand") {
  // ZigZagKV: .5, .8, .95 add up from the best on, so 90 % takes three.
  CHECK(Head({.15f, .5f, .05f, .3f}).tokens_of(.9f) == 3);
  Head quarters({1, 1, 1, 1});
  CHECK(quarters.tokens_of(.5f) == 2);
  CHECK(quarters.tokens_of(.51f) == 3);
  CHECK(quarters.tokens_of(1) == 4);
  CHECK(quarters.tokens_of(1e-6f) == 1);
  CHECK(Head({8, 1, 1, 4}).tokens_of(.5f, {.first = 1}) == 1);
  CHECK(Head({8, 1, 1, 4}).tokens_of(.5f, {.last = 1}) == 1);
  CHECK(Head({8, 1, 1, 4}).tokens_of(.9f, {.last = 1}) == 2);
  CHECK(Head({0, 0, 0}).tokens_of(.9f) == 0);
  CHECK(Head({}).tokens_of(.9f) == 0);
  CHECK(Head({-5, 1, NAN, 1}).tokens_of(.9f) == 2);
  CHECK(Head({1, infinity, infinity}).tokens_of(.9f) == 1);
  CHECK_THROWS_WITH(quarters.tokens_of(0),
                    Catch::Contains("got a share of 0") && Catch::Contains("wanted more than 0"));
  CHECK_THROWS_WITH(quarters.tokens_of(1.5f), Catch::Contains("got a share of 1.5"));
}

TEST_CASE("head_sum by hand") {
  Head head({1, 2, 4, 8});
  CHECK(head.sum() == 15);
  CHECK(head.sum({.first = 1}) == 14);
  CHECK(head.sum({.first = 1, .last = 2}) == 2);
  CHECK(head.sum({.last = 9}) == 0);
  CHECK(Head({}).sum() == 0);
  CHECK(Head({1e30f, 1, -1e30f}).sum() == 0);
  CHECK(std::isnan(Head({1, NAN}).sum()));
  CHECK(Head({1, NAN}).sum({.last = 1}) == 1);
  float two[2];
  CHECK_THROWS_WITH(
      ops::head_sum(head.cache.view(), head.view(), {}, View<float, 2>::dense(two, {1, 2}), Stream::cpu()),
      Catch::Contains("output of another shape"));
}

TEST_CASE("set_listed by hand") {
  std::vector<float> scores = {0, 1, 2, 3, 4, 5, 6, 7};
  const auto of = View<float, 3>::dense(scores.data(), {1, 2, 4});
  std::vector<std::int32_t> index = {2, 0, 1, 3, 9, -1}, count = {1, 3};
  TokenList list;
  list.index = View<std::int32_t, 3>::dense(index.data(), {1, 2, 3});
  list.count = View<std::int32_t, 2>::dense(count.data(), {1, 2});
  ops::set_listed(list, 10, of, Stream::cpu());
  CHECK(scores == std::vector<float>{0, 1, 10, 3, 4, 5, 6, 10});
  CHECK_THROWS_WITH(ops::set_listed(list, 1, View<float, 3>::dense(scores.data(), {2, 2, 2}), Stream::cpu()),
                    Catch::Contains("too small a list"));
}

TEST_CASE("above and logarithm by hand") {
  std::vector<float> x = {.5f, 1, NAN, infinity, -infinity, std::nextafter(.5f, 1.f)};
  const auto of = View<float, 3>::dense(x.data(), {1, 1, 6});
  ops::above(of, .5f, Stream::cpu());
  CHECK(x == std::vector<float>{0, 1, 0, 1, 0, 1});
  ops::logarithm(of, 1, Stream::cpu());
  CHECK(x[0] == 0);
  CHECK(x[1] == Approx(.693147));
  ops::logarithm(of, 0, Stream::cpu());
  CHECK(x[0] == -infinity);
  ops::logarithm(of, 0, Stream::cpu());
  CHECK(std::isnan(x[0]));
}
