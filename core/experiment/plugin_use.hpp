// A plugin as an entry names it, with its parameters.
#pragma once
#include <kvlab/params.hpp>

#include <optional>
#include <string>
#include <vector>

#include "experiment/catalog.hpp"
#include "experiment/entry_keys.hpp"
#include "experiment/reader.hpp"

namespace kvlab {

struct PluginUse {
  Role role = Role::policy;
  std::string name;
  Params params;  // every declared parameter
};

// Whatever is wrong becomes a note.
class UseReader {
 public:
  UseReader(const PluginCatalog& catalog, Problems& problems) : catalog_(catalog), problems_(problems) {}

  const PluginInfo* find(Role role, const std::string& name, yaml::Place place);  // null when there is none

  // Notes that no plugin is called so. what: of the entry, for the message; known: what would do.
  void unknown(const std::string& what, const std::string& name, std::vector<std::string> known, yaml::Place place);

  // A parameter that an entry's own keys hide could never be set.
  void check_names(const PluginInfo& plugin, const std::vector<EntryKey>& keys, yaml::Place place);

  // Defaults, replaced by what `given` says. `also` = keys that may stand beside the parameters, for the message.
  Params params(const PluginInfo& plugin, const std::vector<const yaml::Entry*>& given,
                std::vector<std::string> also = {});

  // `X` or `{X: {...}}`.
  std::optional<PluginUse> use(const yaml::Node& node, Role role);

  const PluginCatalog& catalog() const { return catalog_; }
  Problems& problems() { return problems_; }

 private:
  const PluginCatalog& catalog_;
  Problems& problems_;
};

// An entry of `profilers:`, `NAME` or `{NAME: {...}}`; nothing, and notes, when it is wrong.
std::optional<PluginUse> read_profiler(const yaml::Node& entry, const PluginCatalog&, Problems&);

// Names of an entry's own keys with the label's, for messages.
std::vector<std::string> names_of(const std::vector<EntryKey>& keys);

}  // namespace kvlab
