#include "ops/page/causal.hpp"

#include <catch2/catch.hpp>
#include <vector>

using namespace kvlab;

TEST_CASE("causal: each token of a chunk sees itself and nothing later, in heads of different lengths") {
  const std::vector<std::int32_t> now{7, 5};
  std::vector<std::int32_t> length(6, -1), row(3, -1);
  ops::causal(now.data(), 2, 3, length.data(), row.data(), Stream::cpu());
  CHECK(length == std::vector<std::int32_t>{5, 3, 6, 4, 7, 5});
  CHECK(row == std::vector<std::int32_t>{0, 1, 2});
}
