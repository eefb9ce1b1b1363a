#pragma once
#include <catch2/catch.hpp>

#include "cases/case.hpp"

namespace kvlab::test {

// Checks the op's cases on the device.
inline void run_cases(const std::string& op, Device device) {
  int run = 0;
  for (const cases::Case& c : cases::all()) {
    if (c.op != op || !c.tested(device)) continue;
    CAPTURE(c.shape);
    CHECK(cases::check(c, device) == "");
    ++run;
  }
  CHECK(run > 0);
}

}  // namespace kvlab::test
