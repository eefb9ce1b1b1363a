// Opens plugin libraries. A library that does not match this kvlab exactly is refused with an Error (Errc::plugin,
// where = the file) that gives both values and says what to do. Accepted libraries stay loaded until the process ends:
// an exception or an object of theirs may outlive everything else.
#pragma once
#include <kvlab/params.hpp>
#include <kvlab/plugin.hpp>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace kvlab {

class Library;  // an open shared library

// One registration of a library, copied out of it, or one of the host's own (no owner, empty path).
struct PluginInfo : RoleDeclaration {
  std::filesystem::path library;
  std::string sha256;  // of the library's file when it was loaded
  std::shared_ptr<const Library> owner;
  void* (*create)(const Params*, char*, std::size_t) = nullptr;
  void (*destroy)(void*) = nullptr;
};

// Errc::plugin if the library's note is not this build's, or if loading the file would end the process. A damaged
// library can end it in the system's loader, in a constructor or in its entry. A child process tries the library, so
// this process loads nothing.
void try_library(const std::filesystem::path& path);

// Whether one child process loads all the libraries of this build among `paths`. If it does, none of them needs
// try_library(), whose process of its own takes milliseconds.
bool try_together(const std::vector<std::filesystem::path>& paths);

// Everything that the library at `path` registers, checked: names, pointers, parameter declarations.
std::vector<PluginInfo> load_library(const std::filesystem::path& path);
// The same of a library that try_together() has loaded.
std::vector<PluginInfo> load_tried_library(const std::filesystem::path& path);

// A registration as the host sees it; where = the library's path, empty for the host's own.
PluginInfo info_of(const kvlab_role& role, const std::filesystem::path& path = {},
                   std::shared_ptr<const Library> owner = nullptr);

// Deletes a plugin's object through the plugin; the library outlives the object because the deleter does.
struct PluginDeleter {
  std::shared_ptr<const Library> library;
  void (*destroy)(void*) = nullptr;
  void operator()(void* object) const {
    if (object) destroy(object);
  }
};

template <class Interface>
using Instance = std::unique_ptr<Interface, PluginDeleter>;

// Throws Errc::plugin with the constructor's message, where = "plugin NAME (LIBRARY), constructor()"; NoRoom where it
// got no memory.
void* create_raw(const PluginInfo& plugin, Role wanted, const Params& params);

// Puts the object behind a guard, which owns it. Exceptions of a callback then name plugin, file and callback
// (plugin/callback.hpp). A number that no contract allows is refused where it enters (Errc::plugin).
Instance<Policy> guarded(const PluginInfo& plugin, Instance<Policy> object);
Instance<Scorer> guarded(const PluginInfo& plugin, Instance<Scorer> object);
Instance<Selector> guarded(const PluginInfo& plugin, Instance<Selector> object);
Instance<Budget> guarded(const PluginInfo& plugin, Instance<Budget> object);
Instance<Codec> guarded(const PluginInfo& plugin, Instance<Codec> object);
Instance<Profiler> guarded(const PluginInfo& plugin, Instance<Profiler> object);
Instance<Task> guarded(const PluginInfo& plugin, Instance<Task> object);
Instance<AnswerMetric> guarded(const PluginInfo& plugin, Instance<AnswerMetric> object);
Instance<Pruner> guarded(const PluginInfo& plugin, Instance<Pruner> object);
Instance<Rescorer> guarded(const PluginInfo& plugin, Instance<Rescorer> object);

// Interface: Policy, Scorer, ...; must be the plugin's role. params as resolve() gave them.
template <class Interface>
Instance<Interface> create(const PluginInfo& plugin, const Params& params) {
  void* object = create_raw(plugin, role_of<Interface>, params);
  return guarded(plugin,
                 Instance<Interface>(static_cast<Interface*>(object), PluginDeleter{plugin.owner, plugin.destroy}));
}

}  // namespace kvlab
