// A plugin that an entry names, with its parameters.
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

// Reads plugin uses. Every error becomes a note.
class UseReader {
 public:
  UseReader(const PluginCatalog& catalog, Problems& problems) : catalog_(catalog), problems_(problems) {}

  const PluginInfo* find(Role role, const std::string& name, yaml::Place place);  // null when there is none

  // Notes that no plugin has this name. For the message: `what`, the kind of entry, and `known`, the names.
  void unknown(const std::string& what, const std::string& name, std::vector<std::string> known, yaml::Place place);

  // Notes every parameter that an entry's own key hides, since it could never be set.
  void check_names(const PluginInfo& plugin, const std::vector<EntryKey>& keys, yaml::Place place);

  // The plugin's defaults, replaced by the values of `given`. `also`: further keys of the entry, for the message.
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

// The names of an entry's own keys and of its label's key, for messages.
std::vector<std::string> names_of(const std::vector<EntryKey>& keys);

}  // namespace kvlab
