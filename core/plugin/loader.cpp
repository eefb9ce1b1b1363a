#include "plugin/loader.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <map>
#include <mutex>
#include <new>
#include <set>

#define BOOST_DLL_USE_STD_FS
#include <boost/dll/shared_library.hpp>

#include "base/content_hash.hpp"
#include "base/stream_memory.hpp"
#include "base/text.hpp"
#include "plugin/callback.hpp"
#include "plugin/library_note.hpp"
#include "plugin/parameters.hpp"

namespace fs = std::filesystem;

namespace kvlab {

class Library {
 public:
  explicit Library(boost::dll::shared_library handle) : handle_(std::move(handle)) {}

 private:
  boost::dll::shared_library handle_;
};

namespace {

constexpr std::size_t limit = 4096;  // roles of a library, parameters of a role: more is a corrupt table

[[noreturn]] void refuse(const fs::path& path, const std::string& message) {
  throw Error(Errc::plugin, message, path.string());
}

std::string explain(const std::string& loader_message) {
  const std::string got = "got '" + loader_message + "' from the system's loader, wanted a library that loads; ";
  const auto missing = loader_message.find(": cannot open shared object file");
  if (missing != std::string::npos)
    return "got no library '" + loader_message.substr(0, missing) +
           "', which the plugin needs; install it, or add its folder to LD_LIBRARY_PATH or to the plugin's RPATH";
  if (loader_message.find("undefined symbol") != std::string::npos)
    return got + "a function that the plugin calls is defined nowhere: link the library that has it, or " +
           rebuild_hint();
  return got + rebuild_hint();
}

boost::dll::shared_library open(const fs::path& path) {
  boost::dll::shared_library handle;
  boost::dll::fs::error_code ec;
  handle.load(path, boost::dll::load_mode::rtld_now | boost::dll::load_mode::rtld_local, ec);
  if (!handle.is_loaded()) {
    const char* message = dlerror();
    refuse(path, explain(message ? message : ec.message()));
  }
  return handle;
}

using Entry = const kvlab_plugin*();

// Returns the library's own entry. A lookup also finds the entry of a library that it links, hence the check.
Entry* entry_of(const boost::dll::shared_library& handle, const fs::path& path) {
  Entry* entry = handle.has(KVLAB_ENTRY) ? &handle.get<Entry>(KVLAB_ENTRY) : nullptr;
  Dl_info found{};
  std::error_code ec;
  if (!entry || !dladdr(reinterpret_cast<void*>(entry), &found) || !fs::equivalent(found.dli_fname, path, ec))
    refuse(path, "got no function " KVLAB_ENTRY
                 ", wanted a kvlab plugin; end its source with KVLAB_PLUGIN(...) from <kvlab/plugin.hpp>, "
                 "or take the file out of the plugin folder");
  return entry;
}

void check_description(const kvlab_plugin* plugin, const fs::path& path) {
  if (!plugin) refuse(path, "got a null plugin description, wanted that of KVLAB_PLUGIN(...); " + rebuild_hint());
  if (const auto problem = build_problem(plugin->abi, plugin->size, plugin->build ? plugin->build : "(null)"))
    refuse(path, *problem);
  if (!plugin->roles) refuse(path, "got a null list of roles, wanted that of KVLAB_PLUGIN(...); " + rebuild_hint());
}

bool is_name(const std::string& text) {
  return !text.empty() && text.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_-") == std::string::npos;
}

void check_params(const PluginInfo& plugin, const std::string& where) {
  std::set<std::string> seen;
  for (const ParamSpec& spec : plugin.params) {
    const auto wrong = [&](const std::string& message) {
      throw Error(Errc::plugin, message + "; correct the plugin's registration",
                  where + ": parameter '" + spec.name + "'");
    };
    if (!is_name(spec.name)) wrong("got a parameter name with other letters, wanted a-z, 0-9, _ and -");
    if (!seen.insert(spec.name).second) wrong("got the same parameter twice, wanted it once");
    if (const auto message = check(spec, spec.value))
      wrong("got a default outside of its own declaration: " + *message);
  }
}

}  // namespace

PluginInfo info_of(const kvlab_role& role, const fs::path& path, std::shared_ptr<const Library> owner) {
  const auto need = [&](const void* pointer, const char* field) {
    if (!pointer)
      refuse(path, fmt::format("got a null '{}' in role '{}', wanted it set; register with KVLAB_PLUGIN(...) and {}",
                               field, role.name ? role.name : "(null)", rebuild_hint()));
  };
  need(role.name, "name");
  need(role.version, "version");
  need(role.help, "help");
  need(reinterpret_cast<const void*>(role.create), "create");
  need(reinterpret_cast<const void*>(role.destroy), "destroy");
  if (role.param_count > 0) need(role.params, "params");
  if (role.param_count > limit)
    refuse(path, fmt::format("got {} parameters of '{}', wanted at most {}; {}", role.param_count, role.name, limit,
                             rebuild_hint()));
  if (static_cast<std::uint32_t>(role.role) >= role_count)
    refuse(path, fmt::format("got role number {} of '{}', wanted below {}; {}", static_cast<std::uint32_t>(role.role),
                             role.name, role_count, rebuild_hint()));
  if (!*role.version)
    refuse(path,
           fmt::format("got an empty version of '{}', wanted a text; correct the plugin's registration", role.name));
  if (!is_name(role.name))
    refuse(path,
           fmt::format("got the plugin name '{}', wanted letters a-z, digits, _ and -; rename it in its registration",
                       role.name));
  PluginInfo info;
  info.name = role.name;
  info.role = role.role;
  info.version = role.version;
  info.help = role.help;
  info.params.assign(role.params, role.params + role.param_count);
  info.library = path;
  info.owner = std::move(owner);
  info.create = role.create;
  info.destroy = role.destroy;
  check_params(info, path.empty() ? info.name : path.string() + ": " + info.name);
  return info;
}

namespace {

std::vector<PluginInfo> read_library(const fs::path& file) {
  auto handle = open(file);
  const kvlab_plugin* plugin = entry_of(handle, file)();
  check_description(plugin, file);
  char err[1024] = "";
  std::size_t count = 0;
  const kvlab_role* roles = plugin->roles(&count, err, sizeof err);
  if (!roles || count == 0 || count > limit)
    refuse(file, fmt::format("got {}, wanted a list of roles; correct the plugin's registration",
                             *err ? "the error '" + std::string(err) + "'" : fmt::format("{} roles", count)));
  const auto owner = std::make_shared<const Library>(std::move(handle));
  std::vector<PluginInfo> infos;
  std::set<std::pair<Role, std::string>> seen;
  for (std::size_t i = 0; i < count; ++i) {
    infos.push_back(info_of(roles[i], file, owner));
    if (!seen.emplace(infos.back().role, infos.back().name).second)
      refuse(file, fmt::format("got two registrations of {} '{}', wanted one; rename one of them",
                               name_of(infos.back().role), infos.back().name));
  }
  return infos;
}

// How a child process ended that loaded the libraries one after the other; empty if nothing ended it early.
std::string end_of_trial(const std::vector<fs::path>& files) {
  const unsigned seconds = 20 + static_cast<unsigned>(files.size());
  const pid_t child = fork();
  if (child < 0) return {};  // the system gives no process: load without a trial
  if (child == 0) {
    const rlimit no_core{0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    for (const int fatal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT}) signal(fatal, SIG_DFL);
    alarm(seconds);
    if (const int nowhere = ::open("/dev/null", O_WRONLY); nowhere >= 0) dup2(nowhere, 1), dup2(nowhere, 2);
    std::vector<std::vector<PluginInfo>> open;  // they stay loaded, as in the parent
    for (const fs::path& file : files) try {
        open.push_back(read_library(file));
      } catch (...) {  // an error here is an error in the parent too
      }
    _exit(0);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0)
    if (errno != EINTR) return {};
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return {};
  return WIFSIGNALED(status) ? fmt::format("signal {}", WTERMSIG(status))
                             : fmt::format("exit code {}", WEXITSTATUS(status));
}

void refuse_other_builds(const fs::path& file) {
  const LibraryNote note = library_note(file);  // another build's constructors must not run
  if (const auto problem = build_problem(note.abi, note.size, note.build)) refuse(file, *problem);
}

bool is_of_this_build(const fs::path& file) {
  try {
    refuse_other_builds(file);
    return true;
  } catch (const Error&) {
    return false;
  }
}

// Never destroyed, so that no library is closed while something of it may still be alive.
struct Loaded {
  std::mutex mutex;
  std::map<fs::path, std::vector<PluginInfo>> libraries;
};
Loaded& loaded() {
  static auto& all = *new Loaded;
  return all;
}

fs::path whole(const fs::path& path) {
  std::error_code ec;
  const fs::path file = fs::weakly_canonical(path, ec);
  return file.empty() ? path : file;
}

}  // namespace

void try_library(const fs::path& file) {
  refuse_other_builds(file);
  if (const std::string end = end_of_trial({file}); !end.empty())
    refuse(file, "got a library that ends the process when it is loaded (" + end +
                     "), wanted one that loads; it is damaged or its constructors are: " + rebuild_hint());
}

bool try_together(const std::vector<fs::path>& paths) {
  const std::lock_guard lock(loaded().mutex);
  std::vector<fs::path> files;
  for (const fs::path& path : paths)
    if (const fs::path file = whole(path); !loaded().libraries.contains(file) && is_of_this_build(file))
      files.push_back(file);
  return files.empty() || end_of_trial(files).empty();
}

namespace {

std::vector<PluginInfo> load(const fs::path& path, void (*before)(const fs::path&)) {
  const fs::path file = whole(path);
  const std::lock_guard lock(loaded().mutex);
  auto& libraries = loaded().libraries;
  if (const auto it = libraries.find(file); it != libraries.end()) return it->second;

  before(file);
  const std::string sha256 = content_hashes().sha256_of(file);
  std::vector<PluginInfo> infos = read_library(file);
  for (PluginInfo& info : infos) info.sha256 = sha256;
  libraries.emplace(file, infos);
  return infos;
}

}  // namespace

std::vector<PluginInfo> load_library(const fs::path& path) { return load(path, try_library); }
std::vector<PluginInfo> load_tried_library(const fs::path& path) { return load(path, refuse_other_builds); }

void* create_raw(const PluginInfo& plugin, Role wanted, const Params& params) {
  const Callee who(plugin.name, plugin.library);
  constexpr const char* callback = "constructor";
  if (plugin.role != wanted)
    who.refuse(callback, fmt::format("got a {}, wanted a {}", name_of(plugin.role), name_of(wanted)));
  char err[4096] = "";
  void* object = who.call(callback, [&] { return plugin.create(&params, err, sizeof err); });
  if (object) return object;
  if (std::string(err) == std::bad_alloc().what()) throw NoRoom(who.where(callback) + ": got no memory, wanted more");
  who.refuse(callback,
             *err ? one_line(err) : "got no object and no message, wanted an object; report it to the plugin's author");
}

}  // namespace kvlab
