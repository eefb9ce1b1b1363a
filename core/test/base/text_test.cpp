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
  CHECK(nearest("policy", {"model", "policies"}) == "policies");
  CHECK_FALSE(nearest("h2o", known));
  CHECK_FALSE(nearest("", known));
  CHECK(did_you_mean("knrom", known) == " (did you mean 'knorm'?)");
  CHECK(did_you_mean("zzzzzz", known).empty());
  CHECK(join(known, " | ") == "snapkv | streaming_llm | knorm | quest");
}

TEST_CASE("printable text has no character that moves, colours or hides what a terminal shows") {
  CHECK(printable("Grüße, 日本\t✓\n") == "Grüße, 日本\t✓\n");
  CHECK(printable("\x1b[31m") == "\\x1b[31m");
  CHECK(printable(std::string_view("a\0b", 3)) == "a\\x00b");
  CHECK(printable("\xe2\x81\xa6\xe2\x80\xa8") == "\\u2066\\u2028");
  CHECK(printable("\xc3(\xed\xa0\x80") == "\xef\xbf\xbd(\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
  // printable() escapes every control character below U+0100 (C0 except tab and newline, DEL, C1) and keeps the rest.
  for (unsigned c = 0; c < 0x100; ++c) {
    std::string one = c < 0x80 ? std::string(1, static_cast<char>(c))
                               : std::string{static_cast<char>(0xc0 | c >> 6), static_cast<char>(0x80 | (c & 63))};
    const bool control = (c < 0x20 && c != '\t' && c != '\n') || (c >= 0x7f && c < 0xa0);
    CHECK((printable(one) == one) == !control);
  }
}
