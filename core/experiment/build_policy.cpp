#include "experiment/build_policy.hpp"

#include <kvlab/error.hpp>

#include <optional>
#include <string>

#include "compose/coded.hpp"
#include "compose/compose.hpp"
#include "compose/forwarding.hpp"
#include "compose/pruning.hpp"

namespace kvlab {
namespace {

template <class Interface>
Instance<Interface> make(const std::optional<PluginUse>& use, const PluginCatalog& catalog) {
  if (!use) return {};
  const PluginInfo* info = catalog.find(use->role, use->name);
  if (!info) throw Error(Errc::plugin, "got unknown " + std::string(name_of(use->role)) + " '" + use->name + "'");
  return create<Interface>(*info, use->params);
}

// A policy plugin whose pages on the host are packed.
class Packed final : public ForwardingPolicy {
 public:
  Packed(std::shared_ptr<Policy> inner, const CodecSpec& codec) : ForwardingPolicy(std::move(inner)), codec_(codec) {}
  CodecSpec host_codec() const override { return codec_; }

 private:
  CodecSpec codec_;
};

std::shared_ptr<Policy> packed(std::shared_ptr<Policy> policy, const PolicySpec& spec, const PluginCatalog& catalog) {
  const Instance<Codec> codec = make<Codec>(spec.placement.codec, catalog);
  if (!codec->spec().packs)
    throw Error(Errc::config,
                "got codec '" + spec.placement.codec->name + "' for pages on the host beside policy '" +
                    spec.policy->name +
                    "', wanted one that packs them without loss: the policy says how pages are kept",
                spec.name);
  if (!policy->needs().host_pages())
    throw Error(Errc::config,
                "got a codec for pages on the host beside policy '" + spec.policy->name +
                    "', wanted none: it places no pages there",
                spec.name);
  return std::make_shared<Packed>(std::move(policy), codec->spec());
}

std::shared_ptr<Policy> join(const PolicySpec& spec, const PluginCatalog& catalog, std::optional<Injection> injection) {
  if (spec.policy) {
    std::shared_ptr<Policy> policy = make<Policy>(spec.policy, catalog);
    if (spec.codec && spec.placement.codec)
      throw Error(Errc::config, "got a codec beside one that packs pages on the host, wanted pages in the run's dtype",
                  spec.name);
    if (spec.codec) policy = coded(std::move(policy), *make<Codec>(spec.codec, catalog), spec.name);
    if (spec.placement.codec) policy = packed(std::move(policy), spec, catalog);
    if (!injection) return policy;
    return injected(std::move(policy), spec.name, std::move(*injection));
  }
  Composition parts;
  parts.scorer = make<Scorer>(spec.scorer, catalog);
  parts.rescorer = make<Rescorer>(spec.rescorer, catalog);
  parts.split = make<Budget>(spec.split, catalog);
  parts.selector = make<Selector>(spec.selector, catalog);
  parts.codec = make<Codec>(spec.codec, catalog);
  parts.host_codec = make<Codec>(spec.placement.codec, catalog);
  parts.compress_prompt = spec.schedule.prefill;
  parts.every = spec.schedule.every;
  parts.host = spec.placement.tier == Tier::host;
  parts.resident_tokens = spec.placement.resident;
  parts.injection = std::move(injection);
  parts.name = spec.name;
  return compose(std::move(parts));
}

}  // namespace

std::shared_ptr<Policy> build_policy(const PolicySpec& spec, const PluginCatalog& catalog, const Profile* profile,
                                     std::optional<Injection> injection) {
  std::shared_ptr<Policy> policy = join(spec, catalog, std::move(injection));
  if (spec.pruner)
    policy = pruned(std::move(policy), make<Pruner>(spec.pruner, catalog),
                    {.whole = !spec.policy && !spec.selector, .encodes = !spec.policy, .name = spec.name});
  const bool needed = policy->needs().profile();
  if (needed && spec.profile.empty())
    throw Error(Errc::config,
                "got no profile for '" + spec.name + "', wanted profile: FILE, which `kvlab profile` writes");
  if (!needed && !spec.profile.empty() && spec.ablated.empty())
    throw Error(Errc::config, "got a profile for '" + spec.name + "', wanted none: nothing of it reads one");
  if (needed && profile) policy->load_profile(*profile);
  return policy;
}

bool takes_budget(const PolicySpec& spec, const PluginCatalog& catalog) {
  if (!spec.policy) return spec.scorer || spec.selector;
  try {
    return !make<Policy>(spec.policy, catalog)->needs().own_amount();
  } catch (const Error&) {  // what is wrong with it is said where it is built
    return true;
  }
}

}  // namespace kvlab
