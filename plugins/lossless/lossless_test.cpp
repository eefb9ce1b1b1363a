#include <kvlab/error.hpp>

#include <catch2/catch.hpp>

#include "experiment/build_policy.hpp"
#include "experiment/catalog.hpp"
#include "plugin/parameters.hpp"
#include "plugin/registry.hpp"

using namespace kvlab;

namespace {

struct Built {
  mutable Registry registry;
  RegistryCatalog catalog{registry};

  PluginUse use(Role role, const std::string& name) const {
    return {role, name, resolve(registry.require(role, name), {})};
  }
  std::shared_ptr<Policy> operator()(const PolicySpec& spec) const { return build_policy(spec, catalog); }
  PolicySpec below(const std::string& codec) const {
    PolicySpec spec;
    spec.name = "mine";
    spec.placement.tier = Tier::host;
    spec.placement.codec = use(Role::codec, codec);
    return spec;
  }
};

}  // namespace

TEST_CASE("lossless: pages on the host are packed, for a selector and for a policy that places pages") {
  const Built built;
  PolicySpec spec = built.below("lossless");
  spec.selector = built.use(Role::selector, "quest");
  const auto packs = [](const Policy& p) { return p.host_codec().packs && !p.codecs().front().packs; };
  CHECK(packs(*built(spec)));
  spec.selector.reset();
  CHECK(packs(*built(spec)));  // full
  spec.policy = built.use(Role::policy, "freekv");
  CHECK(packs(*built(spec)));
  CHECK(built(spec)->needs().host_pages());
}

TEST_CASE("lossless: what it does not go with is refused by name") {
  const Built built;
  const auto refused = [&](const PolicySpec& spec, const char* what) {
    CHECK_THROWS_WITH(built(spec), Catch::StartsWith("mine: ") && Catch::Contains(what));
  };
  PolicySpec spec = built.below("lossless");
  spec.scorer = built.use(Role::scorer, "snapkv");
  refused(spec, "got a scorer and a codec that packs pages on the host");
  spec.scorer.reset();
  spec.codec = built.use(Role::codec, "int8");
  refused(spec, "got a codec beside one that packs pages on the host");
  spec = built.below("lossless");
  std::swap(spec.codec, spec.placement.codec);
  refused(spec, "got a codec that packs pages for those on the device");
  spec = built.below("lossless");
  spec.policy = built.use(Role::policy, "leankv");
  refused(spec, "it places no pages there");
  spec.policy = built.use(Role::policy, "heterocache");
  spec.profile = "roles.h5";
  for (const char* codec : {"lossless", "int8"}) {
    spec.placement.codec = built.use(Role::codec, codec);
    refused(spec, "a policy plugin that archives heads there, wanted none: archived tokens come back one by one");
  }
  spec = built.below("lossless");
  spec.codec = built.use(Role::codec, "int8");
  spec.policy = built.use(Role::policy, "freekv");
  refused(spec, "got a codec beside one that packs pages on the host");
}
