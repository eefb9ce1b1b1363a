#include <algorithm>

#include "experiment/policy_spec.hpp"
#include "plugin/parameters.hpp"

namespace kvlab {

std::optional<PolicySpec> without(const PolicySpec& policy, const std::string& component,
                                  const PluginCatalog& catalog) {
  PolicySpec variant = policy;
  variant.name += " -" + component;
  variant.ablated = component;
  bool found = false;
  for_each_use(variant, [&](PluginUse& use) {
    const PluginInfo* plugin = catalog.find(use.role, use.name);
    const ParamSpec* spec = plugin ? find_param(*plugin, component) : nullptr;
    if (!spec || !spec->component || !use.params.get<bool>(component)) return;
    auto values = use.params.values();
    values[component] = false;
    use.params = Params(std::move(values));
    found = true;
  });
  if (!found) return std::nullopt;
  return variant;
}

std::vector<std::string> components(const PolicySpec& policy, const PluginCatalog& catalog) {
  std::vector<std::string> names;
  for_each_use(policy, [&](const PluginUse& use) {
    if (const PluginInfo* plugin = catalog.find(use.role, use.name))
      for (const ParamSpec& spec : plugin->params)
        if (spec.component && std::find(names.begin(), names.end(), spec.name) == names.end())
          names.push_back(spec.name);
  });
  return names;
}

}  // namespace kvlab
