#include <kvlab/codebooks.hpp>

#include <catch2/catch.hpp>
#include <cmath>

#include "cases/paged_fixture.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

const Stream s = Stream::cpu();

// A cache of two heads with so many tokens of 8 elements. Its own keys do not matter.
struct Heads2 {
  explicit Heads2(int first, int second) : cache({1, 2, 8, 4, 4}) {
    for (int head = 0; head < 2; ++head)
      for (int t = 0; t < (head ? second : first); ++t)
        cache.append(0, head, std::vector<float>(8), std::vector<float>(8));
    kv = cache.view();
  }
  PagedFixture cache;
  PagedKv kv;
};

struct Book {
  Book(std::vector<float> of_centres, std::vector<float> of_levels)
      : centres(std::move(of_centres)), levels(std::move(of_levels)) {
    coding.book = {of(centres), of(levels)};
  }
  static View<const float, 1> of(const std::vector<float>& x) {
    return View<const float, 1>::dense(x.data(), {static_cast<std::int64_t>(x.size())});
  }
  std::vector<float> centres, levels;
  Coding coding;
};

// [head][token][d] of two heads and so many tokens.
View<float, 4> rows_of(std::vector<float>& data) {
  return View<float, 4>::dense(data.data(), {1, 2, static_cast<std::int64_t>(data.size()) / 16, 8});
}

View<const float, 2> of_heads(const std::vector<float>& data) {
  return View<const float, 2>::dense(data.data(), {2, 8});
}

}  // namespace

// The card: thresholds (-1, 3), codebook {-.9, -.2, .3, .8}: 2 -> .5 -> .3 -> 1.6, and 3.4 is an outlier.
TEST_CASE("a channel by hand") {
  const Heads2 heads(1, 1);
  Book book({-.9f, -.2f, .3f, .8f}, {-.9f, -.2f, .3f, .8f});
  const std::vector<float> lower{-1, -1, -1, -1, -1, -1, 2, -1, 0, 0, 0, 0, 0, 0, 0, 0},
      upper{3, 3, 3, 3, 3, 3, 2, 3, 1, 1, 1, 1, 1, 1, 1, 1};
  const std::vector<float> before{2, 3.4f, -1.5f, -1, 3, 1, 7, -.9f, .5f, .5f, .5f, .5f, .5f, .5f, .5f, .5f};
  std::vector<float> data = before;
  ops::code_channels(heads.kv, of_heads(lower), of_heads(upper), book.coding, rows_of(data), s);
  // 1 is the zero, and -.2 is the nearest to it. A range of 0 has outliers, too.
  const double wanted[] = {1.6, 3.4, -1.5, -.8, 2.6, .6, 7, -.8};
  for (std::size_t d = 0; d < 8; ++d) CHECK(data[d] == Approx(wanted[d]));
  CHECK((data[1] == before[1] && data[2] == before[2] && data[6] == before[6]));
  for (std::size_t d = 8; d < 16; ++d) CHECK(data[d] == Approx(.4));  // the zero of (0, 1)

  book.coding.exact_outliers = false;
  data = before;
  ops::code_channels(heads.kv, of_heads(lower), of_heads(upper), book.coding, rows_of(data), s);
  const double clamped[] = {1.6, 2.6, -.8, -.8, 2.6, .6, 2, -.8};
  for (std::size_t d = 0; d < 8; ++d) CHECK(data[d] == Approx(clamped[d]));
}

TEST_CASE("a number becomes the level of its nearest centre, and of two the first") {
  const Heads2 heads(1, 0);
  Book book({-.5f, .5f}, {-1, 1});
  const std::vector<float> lower(16, -1), upper(16, 1);
  std::vector<float> data(16);
  data[1] = .01f, data[2] = -.01f, data[3] = 1;
  ops::code_channels(heads.kv, of_heads(lower), of_heads(upper), book.coding, rows_of(data), s);
  CHECK(std::vector<float>(data.begin(), data.begin() + 4) == std::vector<float>{-1, 1, -1, 1});
  CHECK(std::vector<float>(data.begin() + 8, data.end()) == std::vector<float>(8));  // the head without a token
}

TEST_CASE("NaN and infinite numbers stay as they are") {
  const Heads2 heads(1, 0);
  Book book({-.5f, .5f}, {-1, 1});
  std::vector<float> lower(16, -1), upper(16, 1);
  lower[3] = upper[3] = 0;
  for (const bool exact : {true, false}) {
    book.coding.exact_outliers = exact;
    std::vector<float> data(16, .5f);
    data[0] = data[3] = NAN, data[1] = INFINITY, data[2] = -INFINITY;
    ops::code_channels(heads.kv, of_heads(lower), of_heads(upper), book.coding, rows_of(data), s);
    CHECK((std::isnan(data[0]) && std::isnan(data[3])));
    CHECK((data[1] == INFINITY && data[2] == -INFINITY && data[4] == 1));
  }
}

// 16 numbers 0 to 15: their quantiles 1/16 and 15/16 are 15/16 and 225/16. So the range is 105/16 and the zero 7.5.
TEST_CASE("a token's thresholds are quantiles of all its heads' numbers") {
  const Heads2 heads(2, 1);
  Book book({-1, 1}, {-1, 1});
  std::vector<float> data(32, 100);
  for (std::size_t i = 0; i < 8; ++i) data[i] = static_cast<float>(2 * i), data[16 + i] = static_cast<float>(2 * i + 1);
  for (std::size_t i = 0; i < 8; ++i) data[8 + i] = static_cast<float>(i);  // the second token is in one head alone
  ops::code_tokens(heads.kv, 1 / 8., book.coding, rows_of(data), s);
  for (std::size_t i = 0; i < 8; ++i) {
    CAPTURE(i);
    CHECK(data[i] == Approx(i == 0 ? 0 : i < 4 ? .9375 : 14.0625));
    CHECK(data[16 + i] == Approx(i == 7 ? 15 : i < 4 ? .9375 : 14.0625));
    CHECK(data[8 + i] == Approx(i == 0 ? 0 : i == 7 ? 7 : i < 4 ? .4375 : 6.5625));
    CHECK(data[24 + i] == 100);
  }
  // Without outliers the thresholds are the least and the greatest number.
  std::vector<float> few(16, 2);
  few[3] = -4, few[9] = 8;
  ops::code_tokens(Heads2(1, 1).kv, 0, book.coding, rows_of(few), s);
  for (std::size_t i = 0; i < 16; ++i) CHECK(few[i] == (i == 9 ? 8 : -4));
}

TEST_CASE("rows in front of the range stay as they are") {
  const Heads2 heads(3, 3);
  Book book({0}, {0});
  const std::vector<float> lower(16, -1), upper(16, 1);
  const std::vector<std::int32_t> from{2, 0};
  book.coding.range = {View<const std::int32_t, 2>::dense(from.data(), {1, 2}), 1};
  const auto changed = [](const std::vector<float>& data) {
    std::vector<int> out;
    for (std::size_t row = 0; row < 6; ++row) out.push_back(data[8 * row] != .5f);
    return out;
  };
  std::vector<float> keys(48, .5f), values(48, .5f);
  for (std::size_t i = 0; i < 48; i += 8) values[i + 1] = -.5f, values[i + 2] = 1;
  ops::code_channels(heads.kv, of_heads(lower), of_heads(upper), book.coding, rows_of(keys), s);
  ops::code_tokens(heads.kv, 0, book.coding, rows_of(values), s);
  CHECK(changed(keys) == std::vector<int>{0, 0, 1, 0, 1, 1});
  CHECK(changed(values) == std::vector<int>{0, 0, 1, 0, 1, 1});
}

TEST_CASE("ops of codebooks refuse what does not fit") {
  using Catch::Contains;
  const Heads2 heads(1, 1);
  Book book({-1, 1}, {-1, 1});
  const std::vector<float> lower(16, -1), upper(16, 1);
  std::vector<float> data(16);
  const auto channels = [&](const Coding& how, View<const float, 2> low) {
    ops::code_channels(heads.kv, low, of_heads(upper), how, rows_of(data), s);
  };
  CHECK_THROWS_WITH(channels(book.coding, View<const float, 2>::dense(lower.data(), {1, 8})),
                    Contains("got thresholds of another shape"));
  const Book uneven({-1, 1}, {0}), none({}, {});
  CHECK_THROWS_WITH(channels(uneven.coding, of_heads(lower)), Contains("got a codebook of 2 centres and 1 levels"));
  CHECK_THROWS_WITH(channels(none.coding, of_heads(lower)), Contains("got a codebook of 0 centres"));
  Coding how = book.coding;
  how.range.least = -1;
  CHECK_THROWS_WITH(channels(how, of_heads(lower)), Contains("got a least place of -1"));
  how.range = {View<const std::int32_t, 2>::dense(nullptr, {1, 2}), 0};
  CHECK_NOTHROW(channels(how, of_heads(lower)));
  const std::vector<std::int32_t> from{0};
  how.range = {View<const std::int32_t, 2>::dense(from.data(), {1, 1}), 0};
  CHECK_THROWS_WITH(channels(how, of_heads(lower)), Contains("got first places of another shape"));
  for (const double outliers : {-.1, 1., static_cast<double>(NAN)})
    CHECK_THROWS_WITH(ops::code_tokens(heads.kv, outliers, book.coding, rows_of(data), s),
                      Contains("wanted a share below 1"));
}
