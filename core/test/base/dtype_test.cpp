#include <kvlab/dtype.hpp>

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

using kvlab::bf16;

TEST_CASE("bf16 rounds to nearest even and keeps NaN and infinity") {
  CHECK(float(bf16(1.0f)) == 1.0f);
  CHECK(float(bf16(1.00390625f)) == 1.0f);       // halfway between 1 and 1 + 2^-7: to even
  CHECK(float(bf16(1.01171875f)) == 1.015625f);  // halfway, odd below: up
  CHECK(std::isnan(float(bf16(std::nanf("")))));
  CHECK(float(bf16(std::numeric_limits<float>::infinity())) == std::numeric_limits<float>::infinity());
  CHECK(float(bf16(-0.0f)) == 0.0f);
}
