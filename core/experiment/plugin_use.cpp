#include "experiment/plugin_use.hpp"

#include <fmt/format.h>

#include <map>
#include <utility>

#include "base/text.hpp"
#include "experiment/entry.hpp"
#include "plugin/parameters.hpp"

namespace kvlab {

using yaml::Entry;
using yaml::Node;

namespace {

constexpr std::int64_t most_int = 2147483647;

}  // namespace

const PluginInfo* UseReader::find(Role role, const std::string& name, yaml::Place place) {
  try {
    return catalog_.find(role, name);
  } catch (const Error& e) {
    problems_.add(place, e.message(), e.code());
    return nullptr;
  }
}

void UseReader::unknown(const std::string& what, const std::string& name, std::vector<std::string> known,
                        yaml::Place place) {
  std::string message = fmt::format("got unknown {} '{}', wanted one of: {}", what, name,
                                    known.empty() ? "(there is none)" : join(known)) +
                        did_you_mean(name, known);
  if (message.find("did you mean") == message.npos) message += "; plugin_path names folders with plugins of yours";
  for (std::uint32_t r = 0; r < role_count; ++r)
    if (find(static_cast<Role>(r), name, place))
      message += fmt::format("; '{}' is a {}", name, name_of(static_cast<Role>(r)));
  if (const std::size_t n = catalog_.broken())
    message +=
        fmt::format("; {} plugin {} could not be loaded: see `kvlab doctor`", n, n == 1 ? "library" : "libraries");
  problems_.add(place, message, Errc::plugin);
}

void UseReader::check_names(const PluginInfo& plugin, const std::vector<EntryKey>& keys, yaml::Place place) {
  for (const EntryKey& key : keys)
    if (find_param(plugin, key.name))
      problems_.add(place,
                    fmt::format("got plugin '{}' with a parameter '{}', wanted another name: it is a key of every {}",
                                plugin.name, key.name, plugin.role == Role::task ? "task" : "policy"),
                    Errc::plugin);
}

Params UseReader::params(const PluginInfo& plugin, const std::vector<const Entry*>& given,
                         std::vector<std::string> also) {
  std::map<std::string, ParamValue, std::less<>> values;
  for (const ParamSpec& spec : plugin.params) values[spec.name] = spec.value;
  for (const Entry* e : given) {
    const ParamSpec* spec = find_param(plugin, e->key.text);
    if (!spec) {
      std::vector<std::string> known;
      for (const ParamSpec& s : plugin.params) known.push_back(s.name);
      known.insert(known.end(), also.begin(), also.end());
      if (known.empty())
        problems_.add(e->key.place,
                      fmt::format("got key '{}', wanted none: {} has no parameters", e->key.text, plugin.name));
      else
        problems_.add(e->key.place, unknown_key(e->key.text, known));
    } else if (auto value = read_value(e->value, *spec, problems_)) {
      // Plugins read an integer without a declared limit as int.
      if (const auto* i = std::get_if<std::int64_t>(&*value); i && spec->high == any && *i > most_int)
        problems_.add(e->value.place, fmt::format("got {} for '{}', wanted at most {}", *i, spec->name, most_int));
      values[spec->name] = std::move(*value);
    }
  }
  return Params(std::move(values));
}

std::optional<PluginUse> UseReader::use(const Node& node, Role role) {
  const std::string name = use_name(node);
  if (name.empty()) {
    problems_.add(node.place, fmt::format("got {} for '{}', wanted NAME or {{NAME: {{...}}}}", yaml::describe(node),
                                          name_of(role)));
    return std::nullopt;
  }
  const PluginInfo* plugin = find(role, name, node.place);
  if (!plugin) {
    unknown(name_of(role), name, catalog_.names(role), node.place);
    return std::nullopt;
  }
  PluginUse result{role, name, {}};
  const Node none;
  const Node& body = node.is(Node::Kind::map) ? node.entries.front().value : none;
  MapReader map(body, name, problems_);
  result.params = params(*plugin, map.rest());
  return result;
}

std::vector<std::string> names_of(const std::vector<EntryKey>& keys) {
  std::vector<std::string> names{"name"};
  for (const EntryKey& key : keys) names.emplace_back(key.name);
  return names;
}

std::optional<PluginUse> read_profiler(const Node& entry, const PluginCatalog& catalog, Problems& problems) {
  return UseReader(catalog, problems).use(entry, Role::profiler);
}

}  // namespace kvlab
