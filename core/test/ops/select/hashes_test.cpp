// Hashes by hand, and what their ops refuse.
#include <catch2/catch.hpp>

#include <cmath>

#include "cases/paged_fixture.hpp"
#include "ops/attend/attend.hpp"
#include "ops/select/hashes.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

// One KV head of 16 elements, two query heads. Two tables of two bits: their planes are the axes 0 and 1, and 2 and 3.
struct Scene {
  PagedFixture cache{{}};
  std::vector<std::int16_t> code = std::vector<std::int16_t>(64 * 2, -7);
  std::vector<float> mean = std::vector<float>(16, -7), planes = std::vector<float>(16 * 2 * 2);
  std::vector<std::int32_t> bound = {-7, -7};
  std::vector<float> queries = std::vector<float>(32), weights = std::vector<float>(128, -7);
  HeapWorkspace workspace;

  Scene() {
    for (const std::vector<float>& key :
         {std::vector<float>{9, 9, 9, 9}, {3, 1, 1, 1}, {1, 3, 1, 1}, {2, 2, 0, 4}, {2, 2, 2, 2}}) {
      std::vector<float> k = key;
      k.resize(16);
      cache.append(0, 0, k, k, cache.view().tokens(0, 0));
    }
    for (int table = 0; table < 2; ++table)
      for (int bit = 0; bit < 2; ++bit) planes[static_cast<std::size_t>((2 * table + bit) * 4 + 2 * bit + table)] = 1;
    queries[0] = 5;                 // code 1 in table 0, 0 in table 1
    queries[16] = queries[19] = 1;  // 1 and 2
  }
  KeyHashes hashes() {
    KeyHashes h;
    h.code = View<std::int16_t, 4>::dense(code.data(), {1, 1, 64, 2});
    h.mean = View<float, 3>::dense(mean.data(), {1, 1, 16});
    h.bound = View<std::int32_t, 3>::dense(bound.data(), {1, 1, 2});
    h.planes = View<const float, 4>::dense(planes.data(), {1, 16, 2, 2});
    return h;
  }
  View<const float, 3> asked() const { return View<const float, 3>::dense(queries.data(), {1, 2, 16}); }
  Scores out() { return Scores::dense(weights.data(), {1, 2, 64}); }
};

}  // namespace

TEST_CASE("hashes and weights by hand") {
  for (const bool reference : {false, true}) {
    CAPTURE(reference);
    Scene s;
    const KeyHashes h = s.hashes();
    reference ? ops::hash_keys_reference(s.cache.view(), 1, 4, h)
              : ops::hash_keys(s.cache.view(), 1, 4, h, Stream::cpu());
    CHECK(s.bound == std::vector<std::int32_t>{1, 4});
    CHECK(s.mean[0] == 2);
    CHECK(s.mean[2] == Approx(2. / 3));
    CHECK(s.mean[3] == 2);
    // Less the mean: (1, -1, 1/3, -1), (-1, 1, 1/3, -1), (0, 0, -2/3, 2). What is not above 0 has no bit.
    const std::vector<std::int16_t> codes(s.code.begin(), s.code.begin() + 10);
    CHECK(codes == std::vector<std::int16_t>{-7, -7, 1, 1, 2, 1, 0, 2, -7, -7});

    const auto weigh = [&](int least) {
      const Collisions rule{least, 1e-4f};
      reference ? ops::collision_weights_reference(s.cache.view(), s.asked(), rule, h, s.out())
                : ops::collision_weights(s.cache.view(), s.asked(), rule, h, s.out(), s.workspace, Stream::cpu());
    };
    // One of two tables: the bits of both are the same with q = p * p.
    const auto counts_as = [](double cosine) {
      const double p = 1 - std::acos(cosine) / std::acos(-1.);
      return 1 / (1 - (1 - p * p) * (1 - p * p) + 1e-4);
    };
    weigh(1);
    CHECK(s.out()(0, 0, 0) == 1);  // places that are not hashed
    CHECK(s.out()(0, 0, 4) == 1);
    CHECK(s.out()(0, 0, 1) == Approx(counts_as(1 / std::sqrt(28. / 9))));
    CHECK(s.out()(0, 0, 2) == 0);
    CHECK(s.out()(0, 0, 3) == 0);
    CHECK(s.out()(0, 1, 1) == Approx(1 / (.4375 + 1e-4)));  // a right angle
    CHECK(s.out()(0, 1, 2) == 0);
    CHECK(s.out()(0, 1, 3) == Approx(counts_as(2 / std::sqrt(2 * 40. / 9))));
    CHECK(s.out()(0, 1, 5) == -7);  // there is no such token
    weigh(2);
    for (const int t : {1, 2, 3}) CHECK(s.out()(0, 1, t) == 0);
    CHECK(s.out()(0, 1, 0) == 1);

    reference ? ops::hash_keys_reference(s.cache.view(), 3, 1, h)  // none
              : ops::hash_keys(s.cache.view(), 3, 1, h, Stream::cpu());
    weigh(1);
    for (int t = 0; t < 5; ++t) CHECK(s.out()(0, 0, t) == 1);
    CHECK(s.mean[0] == 0);

    // A single key is its own mean: zeros, at a right angle to everything, and no bit is 1.
    reference ? ops::hash_keys_reference(s.cache.view(), 2, 3, h)
              : ops::hash_keys(s.cache.view(), 2, 3, h, Stream::cpu());
    weigh(1);
    CHECK(s.out()(0, 0, 2) == Approx(1 / (.4375 + 1e-4)));
  }
}

TEST_CASE("chances of collisions by hand") {
  CHECK(ops::collision_probability(0, 1, 2, 2) == Approx(.25));
  CHECK(ops::collision_probability(.5, 10, 150, 2) == Approx(.7356).margin(5e-5));
  CHECK(ops::collision_probability(std::sqrt(.75), 10, 150, 2) == Approx(1).margin(1e-4));
  CHECK(ops::collision_probability(1 + 1e-9, 10, 150, 2) == 1);
  CHECK(ops::collision_probability(-1 - 1e-9, 10, 150, 2) == 0);
  CHECK(ops::collision_probability(0, 1, 3, 3) == Approx(.125));
  CHECK(ops::collision_probability(0, 1, 3, 1) == Approx(.875));
  CHECK(ops::collision_probability(0, 1, 1000, 480) ==
        Approx(0.9026168).epsilon(1e-6));  // a sum of binomial coefficients
}

TEST_CASE("planes of hashes are Gaussian, and of each head, group of layers and seed their own") {
  const HashRule rule{10, 150, 3};
  const std::vector<float> planes = hash_planes(rule, 0, 2, 64);
  REQUIRE(planes.size() == 2 * 64 * 1500);
  double sum = 0, squares = 0, within = 0, products = 0;
  const auto n = static_cast<double>(planes.size());
  for (std::size_t i = 0; i < planes.size(); ++i) {
    const double x = planes[i];
    sum += x, squares += x * x, within += std::abs(x) < 1;
    products += x * double{planes[i ^ 1]};  // the other number of the pair
  }
  // Four standard deviations: of a mean of normal numbers, their squares, a share and a product.
  CHECK(std::abs(sum / n) < 4 / std::sqrt(n));
  CHECK(std::abs(squares / n - 1) < 4 * std::sqrt(2 / n));
  CHECK(std::abs(within / n - .682689) < 4 * std::sqrt(.682689 * .317311 / n));
  CHECK(std::abs(products / n) < 4 * std::sqrt(2 / n));
  const std::vector<float> first(planes.begin(), planes.begin() + 64 * 1500),
      second(planes.begin() + 64 * 1500, planes.end());
  CHECK(first != second);
  CHECK(hash_planes(rule, 0, 1, 64) == first);
  CHECK(hash_planes(rule, 1, 1, 64) != first);
  CHECK(hash_planes({10, 150, 4}, 0, 1, 64) != first);
}

TEST_CASE("hashes: what cannot be is refused") {
  Scene s;
  const KeyHashes h = s.hashes();
  PagedKv kv = s.cache.view();
  const auto hash = [&](const KeyHashes& x, int to = 4) { ops::hash_keys(kv, 1, to, x, Stream::cpu()); };
  const auto weigh = [&](int least, const Scores& out) {
    ops::collision_weights(kv, s.asked(), {least, 1e-4f}, h, out, s.workspace, Stream::cpu());
  };
  CHECK_THROWS_WITH(hash(h, 65), Catch::Contains("got places 1 to 65, wanted 0 to 64"));
  CHECK_THROWS_WITH(hash(h, 6), Catch::Contains("got places up to 6, wanted at most 5"));
  KeyHashes wrong = h;
  wrong.mean.extent[2] = 8;
  CHECK_THROWS_WITH(hash(wrong), Catch::Contains("got hashes of another shape"));
  wrong = h;
  wrong.planes.extent[2] = 16;
  CHECK_THROWS_WITH(hash(wrong), Catch::Contains("got codes of 16 bits, wanted 1 to 15"));
  hash(h);
  CHECK_THROWS_WITH(weigh(3, s.out()), Catch::Contains("got 3 tables that must collide, wanted 1 to 2"));
  CHECK_THROWS_WITH(weigh(0, s.out()), Catch::Contains("got 0 tables that must collide"));
  CHECK_THROWS(weigh(1, Scores::dense(s.weights.data(), {1, 2, 4})));  // room for four of five tokens
  kv.rope = RopeRegime::cache_relative;
  CHECK_THROWS_WITH(hash(h), Catch::Contains("cache_relative"));
  Shape shape;
  shape.layers = shape.max_slots = 1, shape.kv_heads = 1, shape.query_heads = 1, shape.head_dim = 16,
  shape.max_tokens = 8;
  for (const HashRule& rule : {HashRule{0, 5, 0}, HashRule{16, 5, 0}, HashRule{3, 0, 0}})
    CHECK_THROWS_WITH(KeptHashes("hashes", shape, rule, {0}, s.workspace), Catch::Contains("wanted 1 to 15 bits"));
}

TEST_CASE("attention with a bias by hand") {
  const float none = -INFINITY;
  for (const bool reference : {false, true})
    for (const bool listed : {false, true}) {
      CAPTURE(reference, listed);
      PagedFixture cache({});
      std::vector<float> q(32, 0.f), zeros(16, 0.f);
      for (const float value : {1.f, 2.f, 4.f, 8.f}) cache.append(0, 0, zeros, std::vector<float>(16, value), 0);
      std::vector<float> bias{0, std::log(3.f), none, 0, none, none, none, none};
      std::vector<std::int32_t> index{0, 1, 2}, count{3};
      TokenList list;
      list.index = View<std::int32_t, 3>::dense(index.data(), {1, 1, 3});
      list.count = View<std::int32_t, 2>::dense(count.data(), {1, 1});
      Guarded<3> out({1, 2, 16});
      Guarded<2> lse({1, 2});
      ops::AttendArgs a;
      a.kv = cache.view();
      a.queries = View<const float, 3>::dense(q.data(), {1, 2, 16});
      a.bias = View<const float, 3>::dense(bias.data(), {1, 2, 4});
      a.out = out.view(), a.lse = lse.view();
      if (listed) a.tokens = &list;
      HeapWorkspace workspace;
      reference ? ops::attend_reference(a) : ops::attend(a, workspace, Stream::cpu());
      // Weights 1, 3, 0 and 1; the list leaves the last token out.
      CHECK(out(0, 0, 7) == Approx(listed ? 7. / 4 : 15. / 5));
      CHECK(lse(0, 0) == Approx(std::log(listed ? 4. : 5.)));
      CHECK(out(0, 1, 7) == 0);  // it reads nothing
      CHECK(lse(0, 1) == none);
      CHECK(out.margins_intact());
      if (reference) continue;
      a.bias.extent[2] = 3;
      CHECK_THROWS_WITH(ops::attend(a, workspace, Stream::cpu()),
                        Catch::Contains("got a bias of 3 tokens, wanted at least 4"));
      a.bias.extent[2] = 4, a.bias.extent[1] = 1;
      CHECK_THROWS_WITH(ops::attend(a, workspace, Stream::cpu()), Catch::Contains("got a bias of another shape"));
      Guarded<3> mass({1, 2, 4});
      a.bias.extent[1] = 2, a.mass = mass.view();
      CHECK_THROWS_WITH(ops::attend(a, workspace, Stream::cpu()),
                        Catch::Contains("got a bias with a list of pages, mass"));
    }
}
