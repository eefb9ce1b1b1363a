// The example of the SDK's page is the class that tests run. It comes first, so it compiles with what it includes.
#include "support/evict_and_recall.hpp"

#include <catch2/catch.hpp>
#include <fstream>
#include <iterator>
#include <string>

#include "support/golden.hpp"

TEST_CASE("the example of core/api/README.md is the class that a test runs") {
  const auto read = [](const char* file) {
    std::ifstream in(kvlab::test::source_root() / file);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  const auto between = [](const std::string& text, const std::string& begin, const std::string& end) {
    const std::size_t from = text.find(begin);
    REQUIRE(from != std::string::npos);
    const std::size_t first = from + begin.size(), last = text.find(end, first);
    REQUIRE(last != std::string::npos);
    return text.substr(first, last - first);
  };
  CHECK(between(read("core/api/README.md"), "```cpp\n", "```") ==
        between(read("core/test/support/evict_and_recall.hpp"), "// begin\n", "// end"));
}
