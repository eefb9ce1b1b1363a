#include "base/library_state.hpp"

#include <catch2/catch.hpp>

using namespace kvlab;

TEST_CASE("a library is looked up by its variable, else by its names in turn") {
  constexpr const char* variable = "KVLAB_TEST_LIBRARY";
  const auto open = [&](const char* value, std::initializer_list<std::string> names, LibraryState& state) {
    state = {};
    value ? setenv(variable, value, 1) : unsetenv(variable);
    return open_library(variable, names, state) != nullptr;
  };
  LibraryState state;
  CHECK(open(nullptr, {"libnobody-has.so.1", "libc.so.6"}, state));
  CHECK(state.text.empty());
  CHECK(open("", {"libc.so.6"}, state));
  CHECK(open("libm.so.6", {"libnobody-has.so.1"}, state));

  CHECK_FALSE(open(nullptr, {"libnobody-has.so.1", "/nowhere/libnobody-has.so.1"}, state));
  CHECK_FALSE(state.off);
  CHECK_THAT(state.text, Catch::Contains("libnobody-has.so.1: ") && Catch::Contains("/nowhere/libnobody-has.so.1: ") &&
                             Catch::Contains("KVLAB_TEST_LIBRARY=PATH"));
  CHECK_FALSE(open("/nowhere/mine.so", {"libc.so.6"}, state));
  CHECK_THAT(state.text, Catch::Contains("/nowhere/mine.so") && !Catch::Contains("libc.so.6"));
  CHECK_FALSE(open("off", {"libc.so.6"}, state));
  CHECK(state.off);
  CHECK(state.text == "turned off by KVLAB_TEST_LIBRARY");
  unsetenv(variable);
}
