#include <kvlab/row_codec.hpp>

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <map>
#include <random>

#include "ops/page/paged.hpp"
#include "plugin/loader.hpp"
#include "plugin/parameters.hpp"
#include "plugin/registry.hpp"

using namespace kvlab;

namespace {

CodecSpec spec_of(const std::string& name, const std::map<std::string, ParamValue>& given = {}) {
  Registry registry;
  const PluginInfo& plugin = registry.require(Role::codec, name);
  return create<Codec>(plugin, resolve(plugin, given))->spec();
}

}  // namespace

TEST_CASE("token_codes: the names say how many bits a page gives keys and values") {
  constexpr CodecSide fp8{8, CodeKind::e4m3};
  const std::map<std::string, CodecSpec> wanted = {
      {"k8v8", {{8}, {8}}}, {"k8v4", {{8}, {4}}}, {"k4v4", {{4}, {4}}}, {"k4v2", {{4}, {2}}}, {"k4v8", {{4}, {8}}},
      {"k2v4", {{2}, {4}}}, {"k16v8", {{}, {8}}}, {"fp8", {fp8, fp8}},  {"int4", {{4}, {4}}},
  };
  for (const auto& [name, spec] : wanted) {
    CAPTURE(name);
    CHECK(spec_of(name) == spec);
    CHECK(spec_of(name, {{"values", false}}) == CodecSpec{spec.k, {}});
    if (spec.k.bits) CHECK(spec_of(name, {{"keys", false}}) == CodecSpec{{}, spec.v});
  }
  CHECK(spec_of("k8v8") == spec_of("int8"));
  CHECK_THROWS_AS(spec_of("k16v8", {{"keys", false}}), Error);
}

// The card's vectors, through a page of the store.
TEST_CASE("atom: a rounded zero, by hand") {
  const auto stored = [](const std::map<std::string, ParamValue>& given, std::vector<float> x) {
    x.resize(16, x.back());
    const PageLayout l = ops::make_layout(DType::f32, spec_of("atom", given), 1, 16, 0);
    std::vector<std::byte> frame(static_cast<std::size_t>(l.bytes));
    ops::write_token(frame.data(), l, 0, x.data(), x.data(), 0);
    std::vector<float> out(16);
    ops::read_row(frame.data(), l, KvSide::key, 0, out.data());
    return out;
  };
  const std::vector<float> card = stored({}, {-1, 0, .33f, 2});  // scale .2, zero 5
  CHECK(card[0] == Approx(-1).margin(2e-3));
  CHECK(card[1] == Approx(0).margin(1e-3));
  CHECK(card[2] == Approx(.4).margin(2e-3));
  CHECK(card[3] == Approx(2).margin(2e-3));
  const std::map<std::string, ParamValue> eight{{"bits", std::int64_t{8}}},
      real{{"bits", std::int64_t{8}}, {"zero", std::string("real")}};
  CHECK(std::abs(stored(eight, {-1, 0, 1})[1]) < 1e-4);  // 127.5 is a tie, which rounding of the scale may break
  CHECK(stored(real, {-1, 0, 1})[1] == Approx(.0039).margin(1e-4));
  // Numbers of one sign: the zero cannot be below the codes, and 15 scales are 2.
  CHECK(stored({}, {10, 12})[0] == Approx(2).epsilon(1e-3));
  CHECK(stored({{"zero", std::string("real")}}, {10, 12})[0] == 10);
  // The range is at least 1e-5.
  CHECK(stored({}, {-3})[0] == Approx(-1e-5).epsilon(.1));
  CHECK(spec_of("atom", real) == spec_of("int8"));
  CHECK(spec_of("atom", {{"zero", std::string("real")}}) == spec_of("int4"));
  CHECK_THROWS_WITH(spec_of("atom", {{"bits", std::int64_t{3}}}), Catch::Contains("got 3 bits, wanted 2, 4 or 8"));
}

namespace {

using ParamMap = std::map<std::string, ParamValue>;

// A row through atom_clip.
std::vector<float> clipped(const ParamMap& given, const std::vector<float>& x) {
  Registry registry;
  const PluginInfo& plugin = registry.require(Role::codec, "atom_clip");
  const auto made = create<Codec>(plugin, resolve(plugin, given));
  const auto& codec = dynamic_cast<const RowCodec&>(*made);
  const auto dim = static_cast<std::int64_t>(x.size());
  std::vector<float> out(x.size(), -7);
  codec.decode(KvSide::key, codec.encode(KvSide::key, View<const float, 2>::dense(x.data(), {1, dim})),
               View<float, 2>::dense(out.data(), {1, dim}));
  return out;
}

void check_near(const std::vector<float>& got, const std::vector<double>& wanted) {
  REQUIRE(got.size() == wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) CHECK(double{got[i]} == Approx(wanted[i]).margin(2e-3));
}

}  // namespace

// Without clipping the scale is .2 and the zero 5. With .5 the ends are -.5 and 1, the scale .1 and the zero 5.
TEST_CASE("atom_clip: the card's vector, and the same clipped, by hand") {
  check_near(clipped({}, {-1, 0, .33f, 2}), {-1, 0, .4, 2});
  check_near(clipped({{"clip", .5}}, {-1, 0, .33f, 2}), {-.5, 0, .3, 1});
  CHECK(clipped({{"clip", .5}}, {10, 12})[0] ==
        Approx(1).epsilon(1e-3));  // one sign: ends 5 and 6, 15 scales of 1 / 15
  CHECK_THROWS_WITH(clipped({{"bits", std::int64_t{3}}}, {1}), Catch::Contains("got 3 bits, wanted 2, 4 or 8"));
  for (const double clip : {0., 1.5, -1.}) CHECK_THROWS_AS(clipped({{"clip", clip}}, {1}), Error);
}

TEST_CASE("atom_clip: without clipping its numbers are those of atom's pages, bit by bit") {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  std::mt19937 rng(1);
  std::normal_distribution<float> normal(0, 3);
  for (const std::int64_t bits : {2, 4, 8})
    for (int row = 0; row < 40; ++row) {
      std::vector<float> x(16);
      for (float& y : x) y = normal(rng) + static_cast<float>(row % 5 - 2) * 4;
      if (row % 8 == 1) x[3] = nan;
      if (row % 8 == 2) x[3] = inf;
      if (row % 8 == 3) x[3] = -inf;
      if (row == 4) x.assign(16, -3);
      if (row == 5) x.assign(16, nan);
      if (row == 6) x.assign(16, 0);
      const ParamMap given{{"bits", bits}};
      const PageLayout l = ops::make_layout(DType::f32, spec_of("atom", given), 1, 16, 0);
      std::vector<std::byte> frame(static_cast<std::size_t>(l.bytes));
      ops::write_token(frame.data(), l, 0, x.data(), x.data(), 0);
      std::vector<float> wanted(16);
      ops::read_row(frame.data(), l, KvSide::key, 0, wanted.data());
      CAPTURE(bits, row);
      CHECK(clipped(given, x) == wanted);
    }
}

TEST_CASE("token_codes: bytes of a token as on LeanKV's card, one state column included") {
  const auto bytes = [](const char* name) {
    return ops::make_layout(DType::bf16, spec_of(name), 16, 128, 1).bytes / 16;
  };
  CHECK(bytes("k8v4") == 208);
  CHECK(bytes("k4v2") == 112);
}
