#include <kvlab/sketch.hpp>

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <map>

#include "cases/paged_fixture.hpp"
#include "ops/attend/attend_made_up.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

using Floats = std::vector<float>;

// A cache of one head, which all leaves, and its sketch. Keys have one number that may differ from 0, and so do values.
struct Head {
  PagedFixture cache{{1, 1, 8, 4, 16}};
  PagedKv kv;
  SketchRule rule;
  HeapWorkspace workspace;
  KeptSketch kept;
  KvSketch sketch;
  std::vector<std::int32_t> keep{0};
  LayerKv layer;

  Head(const SketchRule& of, const std::vector<std::pair<float, float>>& tokens) : rule(of) {
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      Floats key(8, 0.f), value(8, 0.f);
      key[2] = tokens[t].first, value[5] = tokens[t].second;
      cache.append(0, 0, key, value, static_cast<int>(t));
    }
    kv = cache.view();
    Shape shape;
    shape.layers = shape.max_slots = shape.kv_heads = 1, shape.head_dim = 8;
    kept = KeptSketch("sketch", shape, rule, workspace);
    sketch = kept.of(layer);
  }
  void join(std::uint64_t key) {
    ops::sketch_surplus(kv, {.keep = View<const std::int32_t, 2>::dense(keep.data(), {1, 1})}, rule, &key, sketch,
                        Stream::cpu());
  }
  // Element 5 of attention to the made-up tokens alone.
  float attention() {
    const auto query = Floats(8, 0.f);
    Floats out(8, 0.f), lse{-std::numeric_limits<float>::infinity()};
    ops::AttendArgs a;
    a.kv = kv;
    a.queries = View<const float, 3>::dense(query.data(), {1, 1, 8});
    a.out = View<float, 3>::dense(out.data(), {1, 1, 8});
    a.lse = View<float, 2>::dense(lse.data(), {1, 1});
    ops::attend_made_up(a, sketch.tokens, Stream::cpu());
    return out[5];
  }
  float sampled(int j) const { return sketch.tokens.values(0, 0, rule.clusters * rule.samples + j, 5) * 0x1p-30f; }
};

const SketchRule card{.radius = 1, .clusters = 4, .samples = 1, .values = 2};

}  // namespace

// Two keys of zeros with values 1 and 3: one cluster of 2, mu = 10.
TEST_CASE("sketch_surplus: the card's numbers by hand") {
  std::map<std::pair<float, float>, float> outputs;  // by the values that were drawn
  for (std::uint64_t key = 0; key < 400; ++key) {
    Head head(card, {{0, 1}, {0, 3}});
    head.join(key);
    CHECK(head.sketch.count(0, 0, 0) == 1);
    CHECK(head.sketch.count(0, 0, 1) == 2);
    CHECK(head.sketch.squares(0, 0, 0) == 10);
    CHECK(head.sketch.tokens.weights(0, 0, 0) == 2);
    outputs[{head.sampled(0), head.sampled(1)}] = head.attention();
  }
  REQUIRE(outputs.size() == 4);
  CHECK(outputs[{1, 3}] == Approx(10. / 3));  // (10 / 2) (1 + 3 / 9) / 2
  CHECK(outputs[{3, 1}] == Approx(10. / 3));
  CHECK(outputs[{1, 1}] == Approx(5));
  CHECK(outputs[{3, 3}] == Approx(5. / 3));
}

// The mean over draws is what exact attention gives: 2. A draw is 5 or 5 / 3 with probability .1 and .9, so a mean of
// two has a deviation of .71, and that of 20000 of them .005.
TEST_CASE("sketch_surplus: the mean over draws is exact attention") {
  double sum = 0;
  for (std::uint64_t key = 0; key < 20000; ++key) {
    Head head(card, {{0, 1}, {0, 3}});
    head.join(key);
    sum += head.attention();
  }
  CHECK(std::abs(sum / 20000 - 2) < .025);
}

TEST_CASE("sketch_surplus: clusters by distance, and no more than there is room for") {
  // 0 and 1 are one cluster, and 3, 4 and 2.5 another. 9 makes a third. 20 finds no room and joins that.
  Head head({.radius = 1, .clusters = 3, .samples = 2, .values = 1},
            {{0, 1}, {3, 1}, {1, 1}, {4, 1}, {2.5f, 1}, {9, 1}, {20, 1}});
  head.join(5);
  const auto count = [&](int c) { return head.sketch.count(0, 0, 1 + c); };
  CHECK(head.sketch.count(0, 0, 0) == 3);
  CHECK(std::vector<int>{count(0), count(1), count(2)} == std::vector<int>{2, 3, 2});
  CHECK(head.sketch.centre(0, 0, 0, 2) == 0);
  CHECK(head.sketch.centre(0, 0, 1, 2) == 3);
  CHECK(head.sketch.centre(0, 0, 2, 2) == 9);
  CHECK(head.sketch.tokens.weights(0, 0, 2) == 1.5f);  // 3 keys, two samples
  for (int i = 2; i < 4; ++i) {
    const float sample = head.sketch.tokens.keys(0, 0, i, 2);
    CHECK((sample == 3 || sample == 4 || sample == 2.5f));
  }
}

// Each of five keys is a cluster's sample as often as any other.
TEST_CASE("sketch_surplus: samples of a cluster are uniform") {
  std::map<float, int> times;
  for (std::uint64_t key = 0; key < 4000; ++key) {
    Head head({.radius = 10, .clusters = 2, .samples = 1, .values = 1}, {{1, 1}, {2, 1}, {3, 1}, {4, 1}, {5, 1}});
    head.join(key);
    ++times[head.sketch.tokens.keys(0, 0, 0, 2)];
  }
  for (const auto& [key, n] : times) CHECK(std::abs(n - 800) < 130);  // five deviations of 25.3
  CHECK(times.size() == 5);
}

TEST_CASE("sketch_surplus: values of zeros are never drawn, and count in the denominator") {
  Head head(card, {{0, 0}, {0, 0}, {0, 4}, {0, 0}});
  head.join(1);
  CHECK(head.sampled(0) == 4);
  CHECK(head.sampled(1) == 4);
  CHECK(head.attention() == Approx(1));
  Head none(card, {{0, 0}});
  none.join(1);
  CHECK(none.attention() == 0);
}

TEST_CASE("sketch_surplus refuses what it cannot do") {
  Head head(card, {{0, 1}});
  head.rule.values = 3;
  CHECK_THROWS_WITH(head.join(0), Catch::Contains("got a sketch of another shape"));
  head.rule.values = 0;
  CHECK_THROWS_WITH(head.join(0), Catch::Contains("wanted at least one of each"));
  head.rule = card;
  head.rule.radius = NAN;
  CHECK_THROWS_WITH(head.join(0), Catch::Contains("radius nan"));
  head.rule = card;
  head.kv.rope = RopeRegime::re_rotate;
  CHECK_THROWS_WITH(head.join(0), Catch::Contains("wanted RopeRegime::original"));
}
