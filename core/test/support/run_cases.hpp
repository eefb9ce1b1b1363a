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

// Makes a test case of each op's list, called `prefix` and the op's name. Call it while the program starts.
inline bool register_cases(const std::string& prefix, Device device) {
  struct Invoker final : Catch::ITestInvoker {
    std::string op;
    Device device;
    Invoker(std::string name, Device d) : op(std::move(name)), device(d) {}
    void invoke() const override { run_cases(op, device); }
  };
  std::string last;
  for (const cases::Case& c : cases::all()) {  // ordered by op
    if (c.op == last || !c.tested(device)) continue;
    last = c.op;
    const std::string name = prefix + last;
    Catch::AutoReg(new Invoker(last, device), CATCH_INTERNAL_LINEINFO, "", Catch::NameAndTags(name, ""));
  }
  return true;
}

}  // namespace kvlab::test
