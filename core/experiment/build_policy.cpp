#include "experiment/build_policy.hpp"

#include <kvlab/error.hpp>

#include <optional>
#include <string>

#include "compose/coded.hpp"
#include "compose/compose.hpp"
#include "compose/pruning.hpp"
#include "compose/row_coded.hpp"
#include "plugin/tokens_stay.hpp"

namespace kvlab {
namespace {

template <class Interface>
Instance<Interface> make(const std::optional<PluginUse>& use, const PluginCatalog& catalog) {
  if (!use) return {};
  const PluginInfo* info = catalog.find(use->role, use->name);
  if (!info) throw Error(Errc::plugin, "got unknown " + std::string(name_of(use->role)) + " '" + use->name + "'");
  return create<Interface>(*info, use->params);
}

// A codec of the entry. Only an ablation may switch off all that it codes.
Instance<Codec> make_codec(const std::optional<PluginUse>& use, const PolicySpec& spec, const PluginCatalog& catalog) {
  Instance<Codec> codec = make<Codec>(use, catalog);
  if (codec && spec.ablated.empty() && codes_nothing(*codec))
    throw Error(Errc::config,
                "got the codec '" + use->name + "' with neither keys nor values in codes, wanted one of them at least",
                spec.name);
  return codec;
}

[[noreturn]] void refuse_rows(const std::string& name, const char* what) {
  throw Error(Errc::config, std::string("got a codec with a format of its own ") + what, name);
}

// A policy of roles whose codec has a format of its own.
std::shared_ptr<Policy> with_rows(Composition parts, Instance<Codec> codec) {
  if (parts.scorer)
    refuse_rows(parts.name,
                "beside a scorer, wanted full or a selector: it goes by the order of the text, and a scorer evicts");
  if (parts.host_codec && parts.host_codec->spec().packs) throw Error(Errc::config, packs_beside_codes, parts.name);
  return row_coded(compose(std::move(parts)), std::move(codec));
}

std::shared_ptr<Policy> join(const PolicySpec& spec, const PluginCatalog& catalog, std::optional<Injection> injection) {
  if (spec.policy) {
    std::shared_ptr<Policy> policy = make<Policy>(spec.policy, catalog);
    Instance<Codec> codec = make_codec(spec.codec, spec, catalog);
    if (codec && codes_rows(*codec)) {
      if (!tokens_stay(*policy))
        refuse_rows(spec.name,
                    "beside a policy plugin, wanted full, a selector, or a policy that keeps all tokens on the device: "
                    "it goes by the order of the text");
      if (spec.placement.codec)
        refuse_rows(spec.name,
                    "and another codec for pages on the host, wanted none: the policy keeps pages on the device");
      policy = row_coded(std::move(policy), std::move(codec));
    } else if (spec.codec || spec.placement.codec) {
      policy = coded(std::move(policy), codec.get(), make_codec(spec.placement.codec, spec, catalog).get(), spec.name);
    }
    if (!injection) return policy;
    return injected(std::move(policy), spec.name, std::move(*injection));
  }
  Composition parts;
  parts.scorer = make<Scorer>(spec.scorer, catalog);
  parts.rescorer = make<Rescorer>(spec.rescorer, catalog);
  parts.split = make<Budget>(spec.split, catalog);
  parts.selector = make<Selector>(spec.selector, catalog);
  parts.codec = make_codec(spec.codec, spec, catalog);
  parts.host_codec = make_codec(spec.placement.codec, spec, catalog);
  parts.compress_prompt = spec.schedule.prefill;
  parts.every = spec.schedule.every;
  parts.host = spec.placement.tier == Tier::host;
  parts.resident_tokens = spec.placement.resident;
  parts.injection = std::move(injection);
  parts.name = spec.name;
  if (parts.codec && codes_rows(*parts.codec)) {
    Instance<Codec> codec = std::move(parts.codec);
    parts.codec = {};
    return with_rows(std::move(parts), std::move(codec));
  }
  return compose(std::move(parts));
}

}  // namespace

std::shared_ptr<Policy> build_policy(const PolicySpec& spec, const PluginCatalog& catalog, const Profile* profile,
                                     std::optional<Injection> injection) {
  std::shared_ptr<Policy> policy = join(spec, catalog, std::move(injection));
  if (spec.pruner)
    policy =
        pruned(std::move(policy), make<Pruner>(spec.pruner, catalog),
               {.whole = !spec.policy && !spec.selector, .encodes = !spec.policy || spec.codec, .name = spec.name});
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
