#include "plugin/registry.hpp"
#include "test/support/places.hpp"

#include <catch2/catch.hpp>
#include <cstdlib>
#include <fstream>

using namespace kvlab;
namespace fs = std::filesystem;

namespace {

const fs::path bad = test::build_root() / "lib" / "bad_plugins";

// An empty folder of this test. Its end removes the folder.
struct Folder {
  explicit Folder(const char* name) : path(test::build_root() / "registry_test" / name) {
    fs::remove_all(path);
    fs::create_directories(path);
  }
  ~Folder() { fs::remove_all(path); }
  void take(const char* library, const char* as = nullptr) const {
    fs::copy_file(bad / library, path / (as ? as : library));
  }
  fs::path path;
};

struct Environment {
  explicit Environment(const std::string& value) { setenv("KVLAB_PLUGIN_PATH", value.c_str(), 1); }
  ~Environment() { unsetenv("KVLAB_PLUGIN_PATH"); }
};

struct Null final : Codec {
  CodecSpec spec() const override { return {}; }
};

}  // namespace

TEST_CASE("a broken library does not stop its neighbours and is named when it is missed") {
  const Folder folder("broken");
  folder.take("libgood.so");
  folder.take("libold_abi.so");
  folder.take("libnot_elf.so", "libmine.so");
  std::ofstream(folder.path / "README") << "no library";
  folder.take("libnot_elf.so", "libmine_cuda.so");  // the registry ignores the kernels of a plugin

  Registry registry({folder.path});
  REQUIRE(registry.find(Role::budget, "good"));
  CHECK(registry.find(Role::budget, "good")->library == fs::canonical(folder.path / "libgood.so"));
  CHECK_FALSE(registry.find(Role::scorer, "good"));
  int broken = 0;
  for (const Diagnostic& d : registry.diagnostics()) broken += d.path.parent_path() == folder.path;
  CHECK(broken == 2);

  CHECK_THROWS_WITH(registry.require(Role::budget, "mine"),
                    Catch::Contains("libmine.so") && Catch::Contains("not an ELF library"));
  CHECK_THROWS_WITH(registry.require({Role::policy, Role::budget}, "godo"),
                    Catch::Contains("got 'godo', wanted the name of a policy or budget") &&
                        Catch::Contains("did you mean 'good'?") && Catch::Contains("libold_abi.so"));
  CHECK_THROWS_WITH(registry.require(Role::task, "good"), Catch::Contains("'good' is a budget"));
}

TEST_CASE("a library that ends the process is refused, and its neighbours load") {
  const Folder folder("crashing");
  for (const char* name : {"libcrashing.so", "libgood.so", "libold_abi.so"}) folder.take(name);
  const auto file = [&](const char* name) { return folder.path / name; };
  CHECK(try_together({file("libold_abi.so"), file("libgood.so"), file("libabsent.so")}));
  CHECK_FALSE(try_together({file("libgood.so"), file("libcrashing.so")}));
  Registry registry({folder.path});
  CHECK(registry.require(Role::budget, "good").library == fs::canonical(file("libgood.so")));
  std::string said;
  for (const Diagnostic& d : registry.diagnostics())
    if (d.path == file("libcrashing.so")) said = d.message;
  CHECK_THAT(said, Catch::Contains("ends the process when it is loaded (signal 6)"));
}

TEST_CASE("an earlier place wins") {
  const Folder first("first"), second("second");
  first.take("libgood.so");
  second.take("libgood.so");
  {
    Registry registry({second.path, first.path});
    CHECK(registry.require(Role::budget, "good").library == fs::canonical(second.path / "libgood.so"));
    bool noted = false;
    for (const Diagnostic& d : registry.diagnostics()) noted |= d.shadowed && d.path == first.path / "libgood.so";
    CHECK(noted);
  }
  const Environment variable(":" + first.path.string() + ":/nowhere/at/all:");
  {
    Registry registry;
    CHECK(registry.require(Role::budget, "good").library == fs::canonical(first.path / "libgood.so"));
    bool noted = false;
    for (const Diagnostic& d : registry.diagnostics()) noted |= d.path == "/nowhere/at/all";
    CHECK(noted);
  }
  Registry registry({second.path / "libgood.so"});  // a path may name a library
  CHECK(registry.require(Role::budget, "good").library == fs::canonical(second.path / "libgood.so"));
  CHECK(registry.places().size() == 4);
}

TEST_CASE("two libraries of one place with the same name are refused, with both paths") {
  const Folder folder("twice");
  folder.take("libgood.so", "liba.so");
  folder.take("libgood.so", "libb.so");
  Registry registry({folder.path});
  CHECK_THROWS_WITH(registry.find(Role::budget, "good"),
                    Catch::Contains("liba.so") && Catch::Contains("libb.so") && Catch::Contains("remove or rename"));
}

TEST_CASE("the same library through two places is one library") {
  const Folder folder("once");
  folder.take("libgood.so");
  Registry registry({folder.path, folder.path / "libgood.so", folder.path / "." / ""});
  CHECK(registry.find(Role::budget, "good"));
  for (const Diagnostic& d : registry.diagnostics()) CHECK_FALSE(d.path.filename() == "libgood.so");
}

TEST_CASE("a plugin_path that is not there is an error, every time") {
  Registry registry({"/nowhere/at/all"});
  CHECK_THROWS_WITH(registry.list(), Catch::Contains("/nowhere/at/all") && Catch::Contains("correct plugin_path"));
  CHECK_THROWS_AS(registry.list(), Error);
}

TEST_CASE("the host's own roles come first") {
  const Folder folder("own");
  folder.take("libgood.so");
  Registry registry({folder.path});
  registry.add(codec<Null>("plain", "the host's"));
  const PluginInfo& plain = registry.require(Role::codec, "plain");
  CHECK(plain.library.empty());
  CHECK(int{create<Codec>(plain, {})->spec().k.bits} == 0);
}

TEST_CASE("every built plugin reads exactly the parameters that it declares") {
  Registry registry;
  for (const PluginInfo* plugin : registry.list()) {
    CAPTURE(plugin->name, name_of(plugin->role));
    std::map<std::string, ParamValue, std::less<>> values;
    for (const ParamSpec& spec : plugin->params) values[spec.name] = spec.value;
    try {
      const std::unique_ptr<void, PluginDeleter> all(create_raw(*plugin, plugin->role, Params(values)),
                                                     PluginDeleter{plugin->owner, plugin->destroy});
    } catch (const Error& e) {
      CHECK_THAT(e.message(), !Catch::Contains("got a request for parameter"));  // reads declared ones only
      continue;  // a plugin may refuse its defaults: a task needs a file
    }
    for (const ParamSpec& spec : plugin->params) {
      auto without = values;
      without.erase(spec.name);
      CHECK_THROWS_WITH(create_raw(*plugin, plugin->role, Params(without)),
                        Catch::Contains("parameter '" + spec.name + "'"));
    }
  }
}
