#include "plugin/registry.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <set>

#include "base/log.hpp"
#include "base/text.hpp"
#include "plugin/library_note.hpp"

namespace fs = std::filesystem;

namespace kvlab {
namespace {

constexpr const char* missing_place =
    "got no such file or folder in the plugin path, wanted a folder with lib*.so or a library";

std::vector<fs::path> environment_path() {
  std::vector<fs::path> places;
  const char* value = std::getenv("KVLAB_PLUGIN_PATH");
  std::string rest = value ? value : "";
  while (!rest.empty()) {
    const auto colon = rest.find(':');
    if (colon != 0) places.emplace_back(rest.substr(0, colon));
    rest = colon == std::string::npos ? "" : rest.substr(colon + 1);
  }
  return places;
}

// lib/kvlab/plugins of an installation, lib/plugins of a build.
fs::path own_plugins() {
  const fs::path installed = own_folder() / "kvlab" / "plugins";
  std::error_code ec;
  return fs::is_directory(installed, ec) ? installed : own_folder() / "plugins";
}

// lib<name>.so; lib<name>_cuda.so are the kernels of a plugin, which it opens itself.
bool is_plugin_file(const fs::path& file) {
  const std::string name = file.filename().string();
  return name.rfind("lib", 0) == 0 && file.extension() == ".so" &&
         file.stem().string().rfind("_cuda") == std::string::npos;
}

std::vector<fs::path> plugin_files(const fs::path& folder, std::error_code& ec) {
  std::vector<fs::path> files;
  for (fs::directory_iterator it(folder, ec), end; !ec && it != end; it.increment(ec))
    if (is_plugin_file(it->path())) files.push_back(it->path());
  std::sort(files.begin(), files.end());
  return files;
}

std::string words(const std::vector<Role>& roles) {
  std::vector<std::string> all;
  for (const Role role : roles) all.emplace_back(name_of(role));
  return join(all, " or ");
}

}  // namespace

Registry::Registry(std::vector<fs::path> plugin_path) : plugin_path_(std::move(plugin_path)) {}

void Registry::add(const Registration& builtin) {
  PluginInfo info = info_of(builtin.view(builtin.declaration()));
  Key key{info.role, info.name};
  plugins_.insert_or_assign(std::move(key), std::move(info));
}

std::vector<fs::path> Registry::places() const {
  std::vector<fs::path> all = plugin_path_;
  for (auto& place : environment_path()) all.push_back(std::move(place));
  all.push_back(own_plugins());
  return all;
}

void Registry::load() {
  if (loaded_) return;
  std::error_code ec;
  for (const fs::path& place : plugin_path_)
    if (!fs::exists(place, ec))
      throw Error(Errc::plugin, missing_place + std::string("; build the plugin or correct plugin_path"),
                  place.string());
  std::set<fs::path> seen;
  for (const fs::path& place : places())
    if (seen.insert(fs::weakly_canonical(place, ec)).second) load_place(place);
  loaded_ = true;
  for (const fs::path& place : seen) log::debug("plugins from " + place.string());
  for (const Diagnostic& d : diagnostics_) log::debug("plugins: " + d.path.string() + ": " + d.message);
}

void Registry::load_place(const fs::path& place) {
  std::error_code ec;
  if (!fs::exists(place, ec)) {
    if (place != own_plugins())
      diagnostics_.push_back({place, missing_place + std::string("; correct KVLAB_PLUGIN_PATH")});
    return;
  }
  if (!fs::is_directory(place, ec)) return load_file(place, place, false);
  const std::vector<fs::path> files = plugin_files(place, ec);
  const bool tried = try_together(files);
  for (const fs::path& file : files) load_file(file, place, tried);
  if (ec)
    diagnostics_.push_back({place, "got a folder that cannot be read (" + ec.message() + "), wanted one that can"});
}

void Registry::load_file(const fs::path& file, const fs::path& place, bool tried) {
  std::vector<PluginInfo> infos;
  try {
    infos = tried ? load_tried_library(file) : load_library(file);
  } catch (const Error& e) {
    diagnostics_.push_back({file, e.message()});
    return;
  }
  for (PluginInfo& info : infos) {
    const Key key{info.role, info.name};
    const auto old = plugins_.find(key);
    if (old == plugins_.end()) {
      plugins_.emplace(key, std::move(info));
      place_of_.emplace(key, place);
    } else if (old->second.library == info.library) {
      continue;  // the same file, reached through two places
    } else if (const auto at = place_of_.find(key); at != place_of_.end() && at->second == place) {
      const std::string message =
          fmt::format("got two libraries with the {} '{}' ({} and {}), wanted one; remove or rename one of them",
                      name_of(info.role), info.name, old->second.library.string(), info.library.string());
      ambiguous_.emplace(key, message);
      diagnostics_.push_back({file, message});
    } else {
      const std::string winner = old->second.library.empty() ? "kvlab itself" : old->second.library.string();
      diagnostics_.push_back(
          {file,
           fmt::format("{} '{}' is not used: {} has it too and comes first", name_of(info.role), info.name, winner),
           true});
    }
  }
}

const PluginInfo* Registry::find(Role role, const std::string& name) {
  load();
  const Key key{role, name};
  if (const auto it = ambiguous_.find(key); it != ambiguous_.end()) throw Error(Errc::plugin, it->second);
  const auto it = plugins_.find(key);
  return it == plugins_.end() ? nullptr : &it->second;
}

const PluginInfo& Registry::require(const std::vector<Role>& roles, const std::string& name,
                                    const std::vector<std::string>& also) {
  for (const Role role : roles)
    if (const PluginInfo* found = find(role, name)) return *found;

  // A library of that very name is what the user meant: say why it is not there.
  for (const Diagnostic& d : diagnostics_)
    if (!d.shadowed && d.path.stem() == "lib" + name) throw Error(Errc::plugin, d.message, d.path.string());

  auto known = names(roles);
  known.insert(known.begin(), also.begin(), also.end());
  std::string message = "got '" + name + "', wanted the name of a " + words(roles);
  message += known.empty() ? " (there is none in the plugin path)" : ": " + join(known) + did_you_mean(name, known);
  if (message.find("did you mean") == message.npos)
    message += "; a library of yours is found through --plugin-path or KVLAB_PLUGIN_PATH";
  for (const PluginInfo* other : list())
    if (other->name == name) message += fmt::format("; '{}' is a {}", name, name_of(other->role));
  for (const Diagnostic& d : diagnostics_)
    if (!d.shadowed) message += fmt::format("\n  not usable: {}: {}", d.path.string(), d.message);
  throw Error(Errc::plugin, message);
}

std::vector<const PluginInfo*> Registry::list(std::optional<Role> role) {
  load();
  std::vector<const PluginInfo*> all;
  for (const auto& [key, info] : plugins_)
    if (!role || info.role == *role) all.push_back(&info);
  return all;
}

std::vector<std::string> Registry::names(const std::vector<Role>& roles) {
  load();
  std::set<std::string> all;
  for (const auto& [key, info] : plugins_)
    if (std::find(roles.begin(), roles.end(), key.first) != roles.end()) all.insert(key.second);
  return {all.begin(), all.end()};
}

const std::vector<Diagnostic>& Registry::diagnostics() {
  load();
  return diagnostics_;
}

}  // namespace kvlab
