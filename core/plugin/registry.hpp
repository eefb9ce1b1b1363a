// Which plugins there are. Searched in this order: the experiment's plugin_path, KVLAB_PLUGIN_PATH (folders or
// libraries separated by colons), the build's or installation's own folder. An earlier place wins; two libraries of one
// place that offer the same role and name are refused, both, when that name is asked for.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plugin/loader.hpp"

namespace kvlab {

// Why something in the search path cannot be used, or is not what a reader would expect.
struct Diagnostic {
  std::filesystem::path path;
  std::string message;
  bool shadowed = false;  // the library is sound, but an earlier place offers the same name
};

// Libraries are opened at the first question. Not thread-safe. Pointers stay valid as long as the registry.
class Registry {
 public:
  // plugin_path: folders or libraries. One that does not exist is an error at the first question (Errc::plugin).
  explicit Registry(std::vector<std::filesystem::path> plugin_path = {});

  // A role that the host itself offers (`full`); wins over every library.
  void add(const Registration& builtin);

  // Null when there is none. Errc::plugin when two libraries of one place offer it.
  const PluginInfo* find(Role role, const std::string& name);

  // The first of `roles` that has the name. Errc::plugin when none has: gives the nearest name and the broken
  // libraries.
  // also: names that are no plugin's but would do, for the message.
  const PluginInfo& require(const std::vector<Role>& roles, const std::string& name,
                            const std::vector<std::string>& also = {});
  const PluginInfo& require(Role role, const std::string& name) { return require(std::vector<Role>{role}, name); }

  // By name; of one role, or of all, grouped by role.
  std::vector<const PluginInfo*> list(std::optional<Role> role = std::nullopt);
  std::vector<std::string> names(const std::vector<Role>& roles);

  const std::vector<Diagnostic>& diagnostics();

  // The places searched, in order, whether they exist or not.
  std::vector<std::filesystem::path> places() const;

 private:
  using Key = std::pair<Role, std::string>;

  void load();
  void load_place(const std::filesystem::path& place);
  void load_file(const std::filesystem::path& file, const std::filesystem::path& place);

  std::vector<std::filesystem::path> plugin_path_;
  bool loaded_ = false;
  std::map<Key, PluginInfo> plugins_;
  std::map<Key, std::filesystem::path> place_of_;
  std::map<Key, std::string> ambiguous_;  // message of a name that two libraries of one place offer
  std::vector<Diagnostic> diagnostics_;
};

}  // namespace kvlab
