#include <catch2/catch.hpp>
#include <map>

#include "ops/page/paged.hpp"
#include "plugin/loader.hpp"
#include "plugin/parameters.hpp"
#include "plugin/registry.hpp"

using namespace kvlab;

namespace {

Instance<Codec> codec(const std::string& name, const std::map<std::string, ParamValue>& given = {}) {
  Registry registry;
  const PluginInfo& plugin = registry.require(Role::codec, name);
  return create<Codec>(plugin, resolve(plugin, given));
}

}  // namespace

TEST_CASE("kivi: keys by channel, values by token, and the newest tokens exact") {
  for (const int bits : {2, 4}) {
    CAPTURE(bits);
    const std::string name = "kivi" + std::to_string(bits);
    const auto wide = static_cast<std::uint8_t>(bits);
    const CodecSide keys{wide, CodeKind::integer, CodeAxis::channel, 32},
        values{wide, CodeKind::integer, CodeAxis::token, 32};
    CHECK(codec(name)->spec() == CodecSpec{keys, values});
    CHECK(codec(name)->residual() == 128);
    CHECK(codec(name, {{"channels", false}})->spec() == CodecSpec{values, values});
    CHECK(codec(name, {{"keys", false}})->spec() == CodecSpec{{}, values});
    CHECK(codec(name, {{"values", false}})->spec() == CodecSpec{keys, {}});
  }
}

TEST_CASE("kivi: bytes of a token as on the card, its position beside") {
  const auto bytes = [](const char* name, std::int64_t group) {
    const CodecSpec spec = codec(name, {{"group", group}})->spec();
    return ops::make_layout(DType::bf16, spec, 64, 128, 0).bytes / 64 - 4;
  };
  CHECK(bytes("kivi2", 32) == 96);
  CHECK(bytes("kivi2", 64) == 80);
  CHECK(bytes("kivi4", 32) == 160);
}
