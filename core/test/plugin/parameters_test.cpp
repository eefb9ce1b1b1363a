#include "plugin/parameters.hpp"

#include <catch2/catch.hpp>
#include <cmath>

using namespace kvlab;

namespace {

enum class Shade { dark, light };

PluginInfo sample() {
  PluginInfo p;
  p.name = "sample";
  p.params = {make_param("flag", true, -any, any, ""),  make_param("count", 4, 1, any, ""),
              make_param("tries", 2, -1, 3, ""),        make_param("share", 0.5, 0, 1, ""),
              make_param("free", 2.0, -any, any, ""),   make_param("shade", Shade::light, -any, any, ""),
              make_param("note", "none", -any, any, "")};
  return p;
}

std::string why(const char* name, ParamValue value) {
  const PluginInfo p = sample();
  return check(*find_param(p, name), value).value_or("fine");
}

}  // namespace

template <>
struct kvlab::Choices<Shade> {
  static constexpr std::pair<Shade, const char*> all[] = {{Shade::dark, "dark"}, {Shade::light, "light"}};
};

TEST_CASE("a value is checked against kind, range and choices") {
  const std::int64_t one = 1, zero = 0;
  CHECK(why("flag", false) == "fine");
  CHECK(why("flag", one) == "got 1, wanted true or false");
  CHECK(why("count", one) == "fine");
  CHECK(why("count", zero) == "got 0, wanted an integer of at least 1");
  CHECK(why("count", 2.5) == "got 2.5, wanted an integer of at least 1");
  CHECK(why("count", std::string("many")) == "got 'many', wanted an integer of at least 1");
  CHECK(why("tries", std::int64_t{-1}) == "fine");
  CHECK(why("tries", std::int64_t{3}) == "fine");
  CHECK(why("tries", std::int64_t{-2}) == "got -2, wanted an integer from -1 to 3");
  CHECK(why("tries", std::int64_t{4}) == "got 4, wanted an integer from -1 to 3");
  CHECK(why("share", one) == "fine");
  CHECK(why("share", 1.0) == "fine");
  CHECK(why("share", 1.5) == "got 1.5, wanted a number from 0 to 1");
  CHECK(why("share", std::nan("")) != "fine");
  CHECK(why("free", any) != "fine");
  CHECK(why("free", -1e300) == "fine");
  CHECK(why("shade", std::string("dark")) == "fine");
  CHECK(why("shade", std::string("ligth")) == "got 'ligth', wanted one of dark | light (did you mean 'light'?)");
  CHECK(why("shade", true) == "got true, wanted one of dark | light");
  CHECK(why("note", std::string()) == "fine");
  CHECK(why("note", one) == "got 1, wanted text");
}

TEST_CASE("resolve fills defaults, converts integers to reals and refuses the rest") {
  const PluginInfo p = sample();
  const Params defaults = resolve(p, {});
  CHECK(defaults.get<bool>("flag"));
  CHECK(defaults.get<int>("count") == 4);
  CHECK(defaults.get<float>("share") == 0.5f);
  CHECK(defaults.get<Shade>("shade") == Shade::light);
  CHECK(defaults.get<std::string>("note") == "none");

  const Params given = resolve(p, {{"share", std::int64_t{1}}, {"shade", std::string("dark")}, {"flag", false}});
  CHECK(std::get<double>(given.values().find("share")->second) == 1.0);
  CHECK(given.get<Shade>("shade") == Shade::dark);
  CHECK_FALSE(given.get<bool>("flag"));
  CHECK(given.get<int>("count") == 4);

  CHECK_THROWS_WITH(resolve(p, {{"cuont", std::int64_t{1}}}),
                    Catch::Contains("sample.cuont") && Catch::Contains("wanted one of sample's: flag, count, tries") &&
                        Catch::Contains("did you mean 'count'?"));
  CHECK_THROWS_WITH(resolve(p, {{"count", std::int64_t{0}}}), "sample.count: got 0, wanted an integer of at least 1");
  PluginInfo bare;
  bare.name = "bare";
  CHECK_THROWS_WITH(resolve(bare, {{"x", true}}), Catch::Contains("bare has no parameters"));
}
