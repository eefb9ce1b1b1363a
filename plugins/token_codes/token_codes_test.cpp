#include <catch2/catch.hpp>
#include <map>

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

TEST_CASE("token_codes: bytes of a token as on LeanKV's card, one state column included") {
  const auto bytes = [](const char* name) {
    return ops::make_layout(DType::bf16, spec_of(name), 16, 128, 1).bytes / 16;
  };
  CHECK(bytes("k8v4") == 208);
  CHECK(bytes("k4v2") == 112);
}
