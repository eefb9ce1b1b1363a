// What heads keep by the rule of their class, by hand.
#include <kvlab/kinds.hpp>
#include <kvlab/ops.hpp>

#include <catch2/catch.hpp>
#include <cmath>

#include "cases/paged_fixture.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

using Places = std::vector<int>;

constexpr std::uint32_t special = kind_bit(TokenKind::special), punctuation = kind_bit(TokenKind::punctuation);

// One head. Its token t stands at text position 2 t, and its text's kinds repeat: plain, special, punctuation.
struct Head {
  PagedFixture cache{{1, 1, 8, 4, 4}};
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> kinds = {0, 1, 2};
  std::vector<float> scores;

  explicit Head(std::vector<float> of) : scores(std::move(of)) {
    for (std::size_t t = 0; t < scores.size(); ++t) {
      cache.append(0, 0, std::vector<float>(8), std::vector<float>(8), static_cast<int>(2 * t));
      ids.push_back(static_cast<int>(2 * t % 3)), ids.push_back(static_cast<int>((2 * t + 1) % 3));
    }
    ids.push_back(0);  // an empty text has memory too
  }
  std::int64_t tokens() const { return static_cast<std::int64_t>(scores.size()); }

  Places keeps(const std::vector<KeepRule>& rules, const ClassNumbers& classes = {}) {
    Guarded<3> kept({1, 1, tokens()});
    std::int32_t count = -1;
    ops::keep_by_class(cache.view(),
                       {View<const std::int32_t, 2>::dense(ids.data(), {1, 2 * tokens()}),
                        View<const std::uint8_t, 1>::dense(kinds.data(), {3})},
                       View<const float, 3>::dense(scores.data(), {1, 1, tokens()}), classes,
                       View<const KeepRule, 2>::dense(rules.data(), {1, static_cast<std::int64_t>(rules.size())}),
                       kept.view(), View<std::int32_t, 2>::dense(&count, {1, 1}), Stream::cpu());
    Places places;
    for (int t = 0; t < static_cast<int>(tokens()); ++t) {
      CHECK((kept(0, 0, t) == 0 || kept(0, 0, t) == 1));
      if (kept(0, 0, t) == 1) places.push_back(t);
    }
    CHECK(count == static_cast<int>(places.size()));
    return places;
  }
};

}  // namespace

TEST_CASE("keep_by_class: kinds, first and last text positions, and the best others") {
  // Text positions 0, 2, .. 14 have the kinds plain, punctuation, special, plain, punctuation, special, plain,
  // punctuation.
  Head head({1, 9, 9, 5, 9, 9, 5, 9});
  CHECK(head.keeps({{.kinds = special}}) == Places{2, 5});
  CHECK(head.keeps({{.kinds = special | punctuation}}) == Places{1, 2, 4, 5, 7});
  CHECK(head.keeps({{.kinds = special, .first = 3}}) == Places{0, 1, 2, 5});
  CHECK(head.keeps({{.from = 12}}) == Places{6, 7});
  // Of the plain tokens 0, 3 and 6 the best is 3: equal scores rank by lower place.
  CHECK(head.keeps({{.kinds = special | punctuation, .best = 1}}) == Places{1, 2, 3, 4, 5, 7});
  // Tokens of the window compete too, and the window adds nothing to them.
  CHECK(head.keeps({{.kinds = special | punctuation, .from = 6, .best = 1}}) == Places{1, 2, 3, 4, 5, 6, 7});
  CHECK(head.keeps({{.first = 8, .from = 12, .best = 1}}) == Places{0, 1, 2, 3, 4, 6, 7});
  CHECK(head.keeps({{.best = KeepRule::all}}).size() == 8);
  CHECK(head.keeps({{}}).empty());
  CHECK(Head({}).keeps({{.best = 3}}).empty());
  CHECK(Head({NAN, -1, NAN}).keeps({{.best = 2}}) == Places{0, 1});  // NaN ranks last, and by place
}

TEST_CASE("keep_by_class: the first number that is large enough gives the class") {
  Head head({4, 3, 2, 1});
  const std::vector<KeepRule> rules = {{.best = 1}, {.best = 2}, {.best = 3}, {.best = KeepRule::all}};
  const auto kept = [&](std::vector<float> numbers) {
    return head.keeps(rules, {View<const float, 3>::dense(numbers.data(), {1, 1, 3}), .5f}).size();
  };
  CHECK(kept({.5f, .7f, .9f}) == 1);
  CHECK(kept({.4f, .5f, .9f}) == 2);
  CHECK(kept({.4f, .4f, .5f}) == 3);
  CHECK(kept({.4f, .4f, .4f}) == 4);
  CHECK(kept({.4f, .9f, .1f}) == 2);
  CHECK(kept({NAN, NAN, NAN}) == 4);
  const float numbers[3] = {};
  CHECK_THROWS_WITH(head.keeps({{}, {}}, {View<const float, 3>::dense(numbers, {1, 1, 3}), .5f}),
                    Catch::Contains("got 2 rules of a row, wanted one for each of 4 classes"));
}

TEST_CASE("keep_by_class wants a text, and every page on the device") {
  Head head({1});
  Guarded<3> kept({1, 1, 1});
  std::int32_t count = 0;
  const KeepRule rule;
  CHECK_THROWS_WITH(
      ops::keep_by_class(head.cache.view(), {}, kept.view(), {}, View<const KeepRule, 2>::dense(&rule, {1, 1}),
                         kept.view(), View<std::int32_t, 2>::dense(&count, {1, 1}), Stream::cpu()),
      Catch::Contains("got no text, wanted needs() to ask for token ids"));
  Head absent({1, 2, 3, 4, 5});
  absent.cache.unmap(0, 0, 1);
  CHECK_THROWS_WITH(absent.keeps({{}}), Catch::Contains("page"));
}
