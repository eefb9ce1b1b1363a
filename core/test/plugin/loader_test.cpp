#include "plugin/loader.hpp"

#include <algorithm>
#include <catch2/catch.hpp>
#include <fstream>
#include <random>

#include "plugin/library_note.hpp"
#include "plugin/parameters.hpp"
#include "plugin/registry.hpp"
#include "test/support/places.hpp"

namespace fs = std::filesystem;
using namespace kvlab;

namespace {

const fs::path bad = test::build_root() / "lib" / "bad_plugins";

fs::path library(const std::string& name) { return bad / ("lib" + name + ".so"); }

std::string refusal(const fs::path& path) {
  try {
    load_library(path);
  } catch (const Error& e) {
    CHECK(e.code() == Errc::plugin);
    CHECK(e.where().find(path.filename().string()) != std::string::npos);
    return e.message();
  }
  return "(accepted)";
}

PluginInfo good(Role role) {
  for (PluginInfo& info : load_library(library("good")))
    if (info.role == role) return info;
  throw Error(Errc::internal, "no such role");
}

}  // namespace

TEST_CASE("a refused library says what it is, what was wanted and what to do") {
  struct Case {
    const char *library, *got, *wanted, *advice;
  };
  const std::string abi = std::to_string(KVLAB_ABI), size = std::to_string(sizeof(kvlab_plugin));
  const std::string old_abi = "got plugin ABI " + std::to_string(KVLAB_ABI - 1) + ", wanted " + abi;
  const std::string new_abi = "got plugin ABI " + std::to_string(KVLAB_ABI + 1) + ", wanted " + abi;
  const std::string wrong_size = "of " + std::to_string(sizeof(kvlab_plugin) + 8) + " bytes, wanted " + size;
  const Case cases[] = {
      {"old_abi", old_abi.c_str(), "older kvlab", "cmake --build"},
      {"new_abi", new_abi.c_str(), "newer kvlab", "cmake --build"},
      {"wrong_size", wrong_size.c_str(), "another kvlab", "cmake --build"},
      {"wrong_build", "[gcc 1.0, SDK 000000000000]", "wanted [" KVLAB_BUILD "]", "cmake --build"},
      {"null_build", "(null)", "wanted [" KVLAB_BUILD "]", "cmake --build"},
      {"false_note", new_abi.c_str(), "newer kvlab", "cmake --build"},
      {"no_note", "a library without kvlab's note", "wanted a kvlab plugin", "KVLAB_PLUGIN(...)"},
      {"empty_version", "empty version of 'unversioned'", "wanted a text", "correct the plugin's registration"},
      {"no_entry", "no function kvlab_plugin_entry", "wanted a kvlab plugin", "KVLAB_PLUGIN(...)"},
      {"null_description", "null plugin description", "wanted", "rebuild"},
      {"null_roles", "null list of roles", "wanted", "rebuild"},
      {"no_roles", "got 0 roles", "wanted a list", "correct the plugin's registration"},
      {"null_name", "null 'name'", "wanted it set", "KVLAB_PLUGIN(...)"},
      {"null_create", "null 'create' in role 'by_hand'", "wanted it set", "KVLAB_PLUGIN(...)"},
      {"null_destroy", "null 'destroy' in role 'by_hand'", "wanted it set", "KVLAB_PLUGIN(...)"},
      {"null_params", "null 'params' in role 'by_hand'", "wanted it set", "KVLAB_PLUGIN(...)"},
      {"bad_role", "role number 99", "wanted below", "rebuild"},
      {"bad_name", "'by hand'", "wanted letters a-z", "rename"},
      {"bad_default", "got 0", "wanted an integer from 1 to 8", "correct the plugin's registration"},
      {"repeated_param", "same parameter twice", "wanted it once", "correct the plugin's registration"},
      {"repeated_role", "two registrations of budget 'twice'", "wanted one", "rename"},
      {"throwing_registration", "got trouble while registering", "wanted", "correct the plugin's registration"},
      {"missing_dependency", "no library 'libabsent.so'", "the plugin needs", "LD_LIBRARY_PATH"},
      {"undefined_symbol", "undefined symbol: kvlab_defined_nowhere", "wanted", "link the library"},
      {"crashing", "ends the process when it is loaded (signal 6)", "wanted one that loads", "cmake --build"},
      {"not_elf", "not an ELF library", "wanted a compiled plugin", "build the plugin"},
      {"empty", "not an ELF library", "wanted a compiled plugin", "build the plugin"},
      {"nowhere", "no such file", "wanted a plugin library", "check the path"},
  };
  for (const Case& c : cases) {
    CAPTURE(c.library);
    const std::string message = refusal(library(c.library));
    CHECK_THAT(message, Catch::Contains(c.got) && Catch::Contains(c.wanted) && Catch::Contains(c.advice));
  }
}

TEST_CASE("a library that was cut short is refused at every length") {
  std::ifstream in(library("good"), std::ios::binary);
  const std::string whole((std::istreambuf_iterator<char>(in)), {});
  REQUIRE(whole.size() > 1000);
  const fs::path cut = test::build_root() / "libcut.so";
  for (std::size_t length = 0; length < whole.size(); length += length < 70 ? 1 : whole.size() / 50) {
    std::ofstream(cut, std::ios::binary).write(whole.data(), static_cast<std::streamsize>(length));
    CAPTURE(length);
    CHECK_THAT(refusal(cut), Catch::Contains("wanted"));
  }
  fs::remove(cut);
}

TEST_CASE("a library with changed bytes is accepted or refused, and nothing worse") {
  std::ifstream in(library("good"), std::ios::binary);
  const std::string whole((std::istreambuf_iterator<char>(in)), {});
  std::mt19937 random(3);
  const fs::path file = test::build_root() / "libchanged.so";
  int refused = 0;
  for (int i = 0; i < 40; ++i) {
    std::string bytes = whole;
    for (int k = 0; k < 20; ++k) bytes[random() % bytes.size()] = static_cast<char>(random());
    std::ofstream(file, std::ios::binary) << bytes;
    try {
      try_library(file);
    } catch (const Error& e) {
      CHECK(e.code() == Errc::plugin);
      ++refused;
    }
  }
  CHECK(refused > 0);
  fs::remove(file);
}

TEST_CASE("a library for another machine or of another kind is refused") {
  std::ifstream in(library("good"), std::ios::binary);
  const std::string whole((std::istreambuf_iterator<char>(in)), {});
  const fs::path file = test::build_root() / "libother.so";
  const auto with = [&](std::size_t at, char value) {
    std::string bytes = whole;
    bytes[at] = value;
    std::ofstream(file, std::ios::binary) << bytes;
    return refusal(file);
  };
  CHECK_THAT(with(18, 8), Catch::Contains("another machine"));          // e_machine
  CHECK_THAT(with(4, 1), Catch::Contains("another machine"));           // 32-bit class
  CHECK_THAT(with(16, 1), Catch::Contains("wanted a shared library"));  // e_type = relocatable
  CHECK_THAT(with(39, 127), Catch::Contains("program header table"));   // e_phoff far away
  fs::remove(file);
  CHECK_THAT(refusal(bad), Catch::Contains("no regular file"));
}

TEST_CASE("a sound library gives its roles as declared") {
  const auto infos = load_library(library("good"));
  REQUIRE(infos.size() == 2);
  CHECK(infos[0].name == "good");
  CHECK(infos[0].role == Role::budget);
  CHECK(infos[0].version == KVLAB_VERSION);
  CHECK(infos[0].help == "every kind of parameter");
  REQUIRE(infos[0].params.size() == 6);
  CHECK(infos[0].params[1].component);
  CHECK(infos[0].params[4].choices == std::vector<std::string>{"mean", "max", "sum", "softmax_mean"});
  CHECK(infos[1].role == Role::codec);
  CHECK(infos[1].version == "2.5");

  const auto codec = create<Codec>(infos[1], Params());
  CHECK(int{codec->spec().k.bits} == 8);
}

TEST_CASE("a library's note says what its registration says, in every built plugin") {
  Registry registry({library("good")});
  REQUIRE(registry.list().size() > 20);
  for (const PluginInfo* plugin : registry.list()) {
    CAPTURE(plugin->name, name_of(plugin->role));
    CHECK_FALSE(plugin->version.empty());
    const LibraryNote note = library_note(plugin->library);
    CHECK_FALSE(build_problem(note.abi, note.size, note.build));
    REQUIRE(note.roles);
    const auto same = [&](const RoleDeclaration& d) { return d.role == plugin->role && d.name == plugin->name; };
    const auto declared = std::find_if(note.roles->begin(), note.roles->end(), same);
    REQUIRE(declared != note.roles->end());
    CHECK(declared->version == plugin->version);
    CHECK(declared->help == plugin->help);
    REQUIRE(declared->params.size() == plugin->params.size());
    for (std::size_t i = 0; i < plugin->params.size(); ++i) {
      const ParamSpec &a = declared->params[i], &b = plugin->params[i];
      CAPTURE(b.name);
      CHECK((a.name == b.name && a.kind == b.kind && a.value == b.value && a.low == b.low && a.high == b.high));
      CHECK((a.choices == b.choices && a.help == b.help && a.component == b.component));
    }
  }
}

TEST_CASE("a note without roles names the build, and a damaged one is refused") {
  const LibraryNote note = library_note(library("throwing_registration"));
  CHECK(note.abi == KVLAB_ABI);
  CHECK(note.build == KVLAB_BUILD);
  CHECK_FALSE(note.roles);
  CHECK(library_note(library("old_abi")).abi == KVLAB_ABI - 1);

  std::ifstream in(library("good"), std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(in)), {});
  const auto help = bytes.find("every kind of parameter");
  REQUIRE(help != std::string::npos);
  bytes[help - 1] = '\x7f';  // the length of that text
  const fs::path file = test::build_root() / "libdamaged.so";
  std::ofstream(file, std::ios::binary) << bytes;
  CHECK_THROWS_WITH(library_note(file), Catch::Contains("cut short") && Catch::Contains("rebuild"));
  fs::remove(file);
}

TEST_CASE("objects are made through the plugin, and its errors arrive") {
  const PluginInfo plugin = good(Role::budget);
  CHECK_THROWS_WITH(create<Codec>(plugin, resolve(plugin, {})), Catch::Contains("got a budget, wanted a codec"));
  CHECK_THROWS_WITH(create<Budget>(plugin, Params()), Catch::Contains("good") && Catch::Contains("parameter 'flag'"));

  auto budget = create<Budget>(plugin, resolve(plugin, {}));
  CHECK_THROWS_AS(budget->allot({}, Stream::cpu()), Error);  // the library throws it, the test catches it
  budget = create<Budget>(plugin, resolve(plugin, {{"count", std::int64_t{1}}}));
  CHECK(budget);

  const PluginInfo throwing = load_library(library("throwing")).front();
  CHECK_THROWS_WITH(create<Budget>(throwing, resolve(throwing, {})),
                    Catch::Contains("throwing (") && Catch::Contains("got a window above the limit"));
  CHECK_THROWS_WITH(create<Budget>(throwing, resolve(throwing, {{"window", std::int64_t{1}}, {"odd", true}})),
                    Catch::Contains("no std::exception"));
  CHECK_NOTHROW(create<Budget>(throwing, resolve(throwing, {{"window", std::int64_t{4}}})));
  const PluginInfo silent = load_library(library("no_object")).front();
  CHECK_THROWS_WITH(create<Budget>(silent, Params()), Catch::Contains("no object and no message"));
}

TEST_CASE("an object and an error outlive the registry that found the plugin") {
  Instance<Codec> codec;
  try {
    Registry registry({library("good")});
    codec = create<Codec>(registry.require(Role::codec, "plain"), Params());
    const PluginInfo& plugin = registry.require(Role::budget, "good");
    create<Budget>(plugin, resolve(plugin, {}))->allot({}, Stream::cpu());
    FAIL("no exception");
  } catch (const Error& e) {
    CHECK(e.message() == "got a call, wanted none");
  }
  CHECK(int{codec->spec().v.bits} == 8);
}
