#include <kvlab/statistics.hpp>

#include <catch2/catch.hpp>
#include <cmath>
#include <vector>

using namespace kvlab;

TEST_CASE("means are kept per index and tell nothing from zero") {
  Means<2> means;
  means.resize({2, 3});
  means.add({0, 1}, 1);
  means.add({0, 1}, 2);
  means.add({1, 2}, 0);
  const ProfileArray a = means.array("nats");
  CHECK(a.extent == std::vector<std::int64_t>{2, 3});
  CHECK(a.unit == "nats");
  REQUIRE(a.values.size() == 6);
  CHECK(a.values[1] == 1.5f);
  CHECK(a.values[5] == 0);
  for (const std::size_t i : {0u, 2u, 3u, 4u}) CHECK(std::isnan(a.values[i]));
}

TEST_CASE("a sequence that ends leaves nothing, and the others' stay") {
  PerSequence<std::vector<int>> values;
  values.resize(2, 2, 3);
  for (int slot = 0; slot < 2; ++slot)
    for (int layer = 0; layer < 2; ++layer)
      for (int head = 0; head < 3; ++head) values.at(slot, layer, head) = {100 * slot + 10 * layer + head};
  values.clear(0);
  for (int layer = 0; layer < 2; ++layer)
    for (int head = 0; head < 3; ++head) {
      CHECK(values.at(0, layer, head).empty());
      CHECK(values.at(1, layer, head) == std::vector<int>{100 + 10 * layer + head});
    }
}

TEST_CASE("overlap counts what two ascending lists share") {
  CHECK(overlap(std::vector<int>{}, std::vector<int>{1}) == 0);
  CHECK(overlap(std::vector<int>{1, 3, 5}, std::vector<int>{1, 3, 5}) == 3);
  CHECK(overlap(std::vector<int>{0, 2, 9}, std::vector<int>{1, 2, 3, 9, 10}) == 2);
  for (unsigned a = 0; a < 64; ++a)
    for (unsigned b = 0; b < 64; ++b) {  // all subsets of six numbers
      std::vector<int> x, y;
      int both = 0;
      for (int bit = 0; bit < 6; ++bit) {
        if (a >> bit & 1) x.push_back(bit);
        if (b >> bit & 1) y.push_back(bit);
        both += static_cast<int>(a & b) >> bit & 1;
      }
      CHECK(overlap(x, y) == both);
    }
}

TEST_CASE("agreement above chance, entropy and cosine of what is worked out by hand") {
  CHECK(above_chance(1, 0.25) == 1);
  CHECK(above_chance(0.25, 0.25) == 0);
  CHECK(above_chance(0.1, 0.25) == 0);
  CHECK(above_chance(0.625, 0.25) == 0.5);

  CHECK(entropy(std::vector<float>{0, 1, 0}) == 0);
  CHECK(entropy(std::vector<float>(8, 0.125f)) == Approx(std::log(8.)));
  CHECK(entropy(std::vector<float>{0.5f, 0.25f, 0.25f}) == Approx(1.5 * std::log(2.)));

  const std::vector<float> x{3, 4}, turned{-4, 3}, longer{30, 40}, against{-3, -4}, zero{0, 0};
  CHECK(cosine(x, turned) == 0);
  CHECK(cosine(x, longer) == Approx(1));
  CHECK(cosine(x, against) == Approx(-1));
  CHECK(cosine(x, std::vector<float>{1, 0}) == Approx(0.6));
  CHECK(cosine(x, zero) == 0);
}

TEST_CASE("a page's mass is the mean of its group's and ends with the head's tokens") {
  Shape shape;
  shape.query_heads = 4, shape.kv_heads = 2, shape.page_size = 2;
  const std::int32_t lengths[] = {3, 1}, slots[] = {0};
  const std::vector<float> mass{0.5f, 0.25f, 0.25f, 0.125f, 0.125f, 0.75f, 1, 9, 9, 0.5f, 9, 9};
  LayerKv kv;
  kv.shape = &shape;
  kv.pages.length = View<const std::int32_t, 2>::dense(lengths, {1, 2});
  kv.pages.slots = slots;
  kv.mass = View<const float, 3>::dense(mass.data(), {1, 4, 3});
  CHECK(page_mass(kv, 0, 0, 0) == 0.5);
  CHECK(page_mass(kv, 0, 0, 1) == 0.5);
  CHECK(page_mass(kv, 0, 1, 0) == 0.75);  // the page has one token, and mass behind it is not read
}
