#include "ops/score/add_rows.hpp"

#include <kvlab/error.hpp>

#include <catch2/catch.hpp>
#include <vector>

using namespace kvlab;

TEST_CASE("add_rows adds every row to what is there, and refuses fewer places than the sums have") {
  const std::vector<float> mass{1, 2, 3, 4, 10, 20, 30, 40};
  std::vector<float> sums{100, 200, 300, 400};
  const auto of = View<const float, 3>::dense(mass.data(), {2, 2, 2});
  const auto to = View<float, 2>::dense(sums.data(), {2, 2});
  ops::add_rows(of, to, Stream::cpu());
  CHECK(sums == std::vector<float>{111, 222, 333, 444});
  CHECK_THROWS_AS(ops::add_rows(View<const float, 3>::dense(mass.data(), {4, 2, 1}), to, Stream::cpu()), Error);
}
