#include "base/text.hpp"

#include <algorithm>
#include <catch2/catch.hpp>
#include <random>

using namespace kvlab;

namespace {

// The definition, without the table.
std::size_t distance(std::string_view a, std::string_view b) {
  if (a.empty() || b.empty()) return a.size() + b.size();
  const bool swapped = a.size() > 1 && b.size() > 1 && a[0] == b[1] && a[1] == b[0];
  const std::size_t swap = swapped ? distance(a.substr(2), b.substr(2)) + 1 : a.size() + b.size();
  const std::size_t change = distance(a.substr(1), b.substr(1)) + (a[0] != b[0]);
  return std::min({swap, change, distance(a.substr(1), b) + 1, distance(a, b.substr(1)) + 1});
}

}  // namespace

TEST_CASE("edit distance equals its definition") {
  CHECK(edit_distance("kitten", "sitting") == 3);
  CHECK(edit_distance("", "abc") == 3);
  CHECK(edit_distance("light", "ligth") == 1);
  std::mt19937 rng(1);
  for (int i = 0; i < 200; ++i) {
    std::string a(rng() % 6, 'a'), b(rng() % 6, 'a');
    for (char& c : a) c = static_cast<char>('a' + rng() % 3);
    for (char& c : b) c = static_cast<char>('a' + rng() % 3);
    CHECK(edit_distance(a, b) == distance(a, b));
  }
}

TEST_CASE("the nearest word is a slip of the pen away or none") {
  const std::vector<std::string> known = {"snapkv", "streaming_llm", "knorm", "quest"};
  CHECK(nearest("snapvk", known) == "snapkv");
  CHECK(nearest("streaming-lm", known) == "streaming_llm");
  CHECK(nearest("qest", known) == "quest");
  CHECK_FALSE(nearest("h2o", known));
  CHECK_FALSE(nearest("", known));
  CHECK(did_you_mean("knrom", known) == " (did you mean 'knorm'?)");
  CHECK(did_you_mean("zzzzzz", known).empty());
  CHECK(join(known, " | ") == "snapkv | streaming_llm | knorm | quest");
}
