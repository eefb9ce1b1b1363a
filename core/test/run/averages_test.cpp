#include "run/averages.hpp"

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

using namespace kvlab;

TEST_CASE("means and percentiles") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  CHECK(mean({1, nan, 2}) == 1.5);
  CHECK(std::isnan(mean({nan})));
  CHECK(percentile({4, 1, 3, 2}, 0.5) == 2);
  CHECK(percentile({4, 1, 3, 2}, 0.95) == 4);
  CHECK(percentile({7}, 0.01) == 7);
  CHECK(std::isnan(percentile({}, 0.5)));
  // NaN means not measured and is left out at any place. Infinite values are measured and count.
  const double inf = std::numeric_limits<double>::infinity();
  for (const std::vector<double>& v : {std::vector{nan, 1., 2., 3.}, {1., 2., nan, 3.}, {3., 2., 1., nan}}) {
    CHECK(percentile(v, 0.5) == 2);
    CHECK(percentile(v, 1) == 3);
  }
  CHECK(std::isnan(percentile({nan, nan}, 0.5)));
  CHECK(mean({1, inf, nan}) == inf);
  CHECK(percentile({1, inf, 2}, 1) == inf);
}
