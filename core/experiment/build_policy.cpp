#include "experiment/build_policy.hpp"

#include <kvlab/error.hpp>

#include <optional>
#include <string>

#include "compose/compose.hpp"

namespace kvlab {
namespace {

template <class Interface>
Instance<Interface> make(const std::optional<PluginUse>& use, const PluginCatalog& catalog) {
  if (!use) return {};
  const PluginInfo* info = catalog.find(use->role, use->name);
  if (!info) throw Error(Errc::plugin, "got unknown " + std::string(name_of(use->role)) + " '" + use->name + "'");
  return create<Interface>(*info, use->params);
}

std::shared_ptr<Policy> join(const PolicySpec& spec, const PluginCatalog& catalog, std::optional<Injection> injection) {
  if (spec.policy) {
    Instance<Policy> policy = make<Policy>(spec.policy, catalog);
    if (!injection) return policy;
    return injected(std::move(policy), spec.name, std::move(*injection));
  }
  Composition parts;
  parts.scorer = make<Scorer>(spec.scorer, catalog);
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
  const bool needed = policy->needs().profile();
  if (needed && spec.profile.empty())
    throw Error(Errc::config,
                "got no profile for '" + spec.name + "', wanted profile: FILE, which `kvlab profile` writes");
  if (!needed && !spec.profile.empty() && spec.ablated.empty())
    throw Error(Errc::config, "got a profile for '" + spec.name + "', wanted none: nothing of it reads one");
  if (needed && profile) policy->load_profile(*profile);
  return policy;
}

}  // namespace kvlab
