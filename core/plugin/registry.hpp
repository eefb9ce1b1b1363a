// Finds plugins. It searches in this order: the experiment's plugin_path, KVLAB_PLUGIN_PATH (folders or libraries
// separated by colons), the build's or installation's own folder. An earlier place wins. If two libraries of one place
// offer the same role and name, a request for that name is an error.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plugin/loader.hpp"

namespace kvlab {

// Why a file or folder of the search path cannot be used, or why another library comes before it.
struct Diagnostic {
  std::filesystem::path path;
  std::string message;
  bool shadowed = false;  // the library is sound, but an earlier place offers the same name
};

// Opens the libraries at the first question. Not thread-safe. Pointers stay valid as long as the registry lives.
class Registry {
 public:
  // plugin_path: folders or libraries. One that does not exist is an error at the first question (Errc::plugin).
  explicit Registry(std::vector<std::filesystem::path> plugin_path = {});

  // A role that the host itself offers (`full`); wins over every library.
  void add(const Registration& builtin);

  // Null when there is none. Errc::plugin when two libraries of one place offer it.
  const PluginInfo* find(Role role, const std::string& name);

  // Returns the plugin of the first of `roles` that has the name. Errc::plugin if none has it; the message gives the
  // nearest name and the broken libraries. also: other names that the message offers, which belong to no plugin.
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
  void load_file(const std::filesystem::path& file, const std::filesystem::path& place, bool tried);

  std::vector<std::filesystem::path> plugin_path_;
  bool loaded_ = false;
  std::map<Key, PluginInfo> plugins_;
  std::map<Key, std::filesystem::path> place_of_;
  std::map<Key, std::string> ambiguous_;  // message of a name that two libraries of one place offer
  std::vector<Diagnostic> diagnostics_;
};

}  // namespace kvlab
