#include "support/score_cases.hpp"
#include "cases/place.hpp"
#include "cases/quick.hpp"

using namespace kvlab::test;
using namespace kvlab::cases;

TEST_CASE("cuda rows and moments and arithmetic on scores equal their references on caches of every kind") {
  for (unsigned n = 0; n < 36; n += quick() ? 5 : 1) check_scores<OnDevice>(n);
  check_long_heads<OnDevice>();
}
