#pragma once
#include <catch2/catch.hpp>
#include <cstdio>

#include "cases/case.hpp"

namespace kvlab::test {

// Checks the op's cases on the device.
inline void run_cases(const std::string& op, Device device) {
  int run = 0, skipped = 0;
  for (const cases::Case& c : cases::all()) {
    if (c.op != op || !c.tested(device)) continue;
    CAPTURE(c.shape);
    const std::optional<std::string> differs = cases::check(c, device);
    CHECK(differs.value_or("") == "");
    ++(differs ? run : skipped);
  }
  if (skipped) std::printf("skipped: %d cases of %s that need a library\n", skipped, op.c_str());
  CHECK(run > 0);
}

}  // namespace kvlab::test
