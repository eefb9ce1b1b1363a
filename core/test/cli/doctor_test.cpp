#include "cli/doctor.hpp"

#include <catch2/catch.hpp>

#include "model/bundled.hpp"
#include "support/child.hpp"

using namespace kvlab;

TEST_CASE("doctor reads the driver's version from what the kernel says") {
  const test::Folder folder;
  const auto version_in = [&](const char* text) { return driver_version(folder.write("version", text)); };
  CHECK(version_in("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"
                   "GCC version:  gcc version 12.2.0\n") == "535.183.01");
  CHECK(version_in("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\n") ==
        "580.82.07");
  CHECK(version_in("something else\nGCC 12.2.0\n").empty());
  CHECK(driver_version(folder / "none").empty());
}

TEST_CASE("the list of models says how many KV heads each has") {
  const std::string text = models_text();
  CHECK_THAT(text,
             Catch::Contains("synthetic/tiny           2 layers, 4 query heads, 2 KV heads of 16, random weights"));
  const auto at = text.find("bundled/recall ");
  REQUIRE(at != text.npos);
  const auto model = open_model("bundled/recall", "", ".");
  CHECK_THAT(text.substr(at, text.find('\n', at) - at),
             Catch::Contains(std::to_string(model->config().kv_heads) + " KV heads"));
}
