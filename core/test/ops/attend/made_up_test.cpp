// Made-up tokens by hand.
#include <catch2/catch.hpp>
#include <kvlab/ops.hpp>

#include <cmath>
#include <limits>

#include "cases/paged_fixture.hpp"
#include "ops/attend/attend_made_up.hpp"
#include "ops/select/reference.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

// `count` made-up tokens of one KV head of 16 elements.
struct Made {
  explicit Made(std::int64_t count) : keys({1, 1, count, 16}), values({1, 1, count, 16}), weights({1, 1, count}) {
    for (std::int64_t i = 0; i < count; ++i) {
      weights(0, 0, i) = 0;
      for (int d = 0; d < 16; ++d) keys(0, 0, i, d) = values(0, 0, i, d) = 0;
    }
  }
  void set(int i, float logit, float value, float weight) {
    keys(0, 0, i, 3) = logit;
    for (int d = 0; d < 16; ++d) values(0, 0, i, d) = value;
    weights(0, 0, i) = weight;
  }
  MadeUpTokens tokens() const { return {keys.view(), values.view(), weights.view()}; }
  Guarded<4> keys, values;
  Guarded<3> weights;
};

}  // namespace

TEST_CASE("made-up tokens join attention by hand") {
  const float minus_infinity = -std::numeric_limits<float>::infinity();
  for (const bool reference : {false, true}) {
    CAPTURE(reference);
    PagedFixture cache({});
    std::vector<float> q(16, 0.f);
    q[3] = 1;
    Guarded<3> out({1, 1, 16});
    Guarded<2> lse({1, 1});
    ops::AttendArgs a;
    a.kv = cache.view();
    a.queries = View<const float, 3>::dense(q.data(), {1, 1, 16});
    a.softmax_scale = 1;
    a.out = out.view(), a.lse = lse.view();
    const auto join = [&](const Made& made, float value, float of_lse) {
      for (int d = 0; d < 16; ++d) out(0, 0, d) = value;
      lse(0, 0) = of_lse;
      reference ? ops::attend_made_up_reference(a, made.tokens())
                : ops::attend_made_up(a, made.tokens(), Stream::cpu());
    };
    Made made(3);
    join(made, 4, std::log(8.f));  // there are none
    CHECK(out(0, 0, 5) == 4);
    CHECK(lse(0, 0) == std::log(8.f));
    made.set(1, std::log(2.f), 12, 4);  // e^(ln 2) four times: as much as all others
    join(made, 4, std::log(8.f));
    CHECK(out(0, 0, 5) == Approx(8));
    CHECK(lse(0, 0) == Approx(std::log(16.f)));
    made.set(2, 0, 40, 16);
    join(made, 4, std::log(8.f));
    CHECK(out(0, 0, 5) == Approx(24));  // (8 * 4 + 8 * 12 + 16 * 40) / 32
    join(made, 0, minus_infinity);      // the attention read nothing
    CHECK(out(0, 0, 5) == Approx((8. * 12 + 16 * 40) / 24));
    CHECK(lse(0, 0) == Approx(std::log(24.f)));
    made.set(2, 200, 7, 1);  // e^200 is no float
    join(made, 4, std::log(8.f));
    CHECK(out(0, 0, 5) == Approx(7));
    CHECK(lse(0, 0) == Approx(200));
    CHECK(out.margins_intact());
  }
}

TEST_CASE("tokens that leave become their mean by hand") {
  for (const bool reference : {false, true}) {
    CAPTURE(reference);
    PagedFixture cache({});  // pages of 4
    Made made(2);
    const Pins pins{.first = 2};
    std::int32_t keep = 5;
    const Surplus surplus{.keep = View<const std::int32_t, 2>::dense(&keep, {1, 1}), .pins = &pins};
    const auto fold = [&] {
      reference ? ops::fold_surplus_reference(cache.view(), surplus, 1, made.tokens())
                : ops::fold_surplus(cache.view(), surplus, 1, made.tokens(), Stream::cpu());
    };
    const auto append = [&](int t) {
      cache.append(0, 0, std::vector<float>(16, static_cast<float>(t)),
                   std::vector<float>(16, static_cast<float>(t * t)));
    };
    for (int t = 0; t < 5; ++t) append(t);
    fold();  // nothing leaves
    CHECK(made.weights(0, 0, 1) == 0);
    for (int t = 5; t < 10; ++t) append(t);
    fold();  // 2 to 6 leave: the card's case of RazorAttention
    CHECK(made.weights(0, 0, 1) == 5);
    CHECK(made.keys(0, 0, 1, 9) == Approx(4));
    CHECK(made.values(0, 0, 1, 9) == Approx((4 + 9 + 16 + 25 + 36) / 5.));
    keep = 9;  // one token leaves: 2 once more
    fold();
    CHECK(made.weights(0, 0, 1) == 6);
    CHECK(made.keys(0, 0, 1, 9) == Approx((5 * 4 + 2) / 6.));
    CHECK(made.values(0, 0, 1, 9) == Approx((5 * 18 + 4) / 6.));
    CHECK(made.weights(0, 0, 0) == 0);
    CHECK(made.keys.margins_intact());
  }
}

TEST_CASE("made-up tokens of another shape are refused, and means of keys without a fixed place") {
  PagedFixture cache({});
  Made made(1);
  std::int32_t keep = 0;
  const Surplus surplus{.keep = View<const std::int32_t, 2>::dense(&keep, {1, 1})};
  PagedKv kv = cache.view();
  CHECK_THROWS_WITH(ops::fold_surplus(kv, surplus, 1, made.tokens(), Stream::cpu()),
                    Catch::Contains("got made-up token 1, wanted one of 1"));
  CHECK_THROWS_WITH(ops::fold_surplus(kv, {}, 0, made.tokens(), Stream::cpu()), Catch::Contains("got numbers to keep"));
  MadeUpTokens short_rows = made.tokens();
  short_rows.keys.extent[3] = 8;
  CHECK_THROWS_WITH(ops::fold_surplus(kv, surplus, 0, short_rows, Stream::cpu()),
                    Catch::Contains("got made-up tokens of another shape"));
  kv.rope = RopeRegime::re_rotate;
  CHECK_THROWS_WITH(ops::fold_surplus(kv, surplus, 0, made.tokens(), Stream::cpu()),
                    Catch::Contains("got keys that RoPE turns by rank"));
  ops::AttendArgs a;
  a.kv = cache.view();
  CHECK_THROWS_WITH(ops::attend_made_up(a, made.tokens(), Stream::cpu()), Catch::Contains("got no lse"));
}
