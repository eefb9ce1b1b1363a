// The C interface between a plugin library and kvlab. The library's entry returns a constant kvlab_plugin. The first
// fields of that struct never move, so kvlab checks them before it calls or follows anything else. abi, size and build
// must match exactly. A change below, or in any header of the SDK, changes the build.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>  // defines the standard library's version macros

#include "kvlab/build_id.hpp"  // generated: KVLAB_VERSION, KVLAB_API_HASH

namespace kvlab {

class Params;
struct ParamSpec;

enum class Role : std::uint32_t { policy, scorer, selector, budget, codec, profiler, task, metric, pruner, rescorer };
inline constexpr std::uint32_t role_count = 10;

// The role's word in YAML, `list` and messages.
constexpr const char* name_of(Role role) {
  constexpr const char* words[role_count] = {"policy",   "scorer", "selector", "budget", "codec",
                                             "profiler", "task",   "metric",   "pruner", "rescorer"};
  const auto i = static_cast<std::uint32_t>(role);
  return i < role_count ? words[i] : "?";
}

}  // namespace kvlab

extern "C" {

// One role that the library offers. The library owns all that the fields point to, for as long as it is loaded.
struct kvlab_role {
  const char* name;  // as YAML spells it: a-z 0-9 _ -
  kvlab::Role role;
  const char* version;
  const char* help;  // one line
  const kvlab::ParamSpec* params;
  std::size_t param_count;
  // Returns the role's interface pointer (a kvlab::Scorer* for a scorer, ...), or null with a message in err, which has
  // room for cap bytes. Never throws.
  void* (*create)(const kvlab::Params* params, char* err, std::size_t cap);
  void (*destroy)(void* object);  // deletes an object of create
};

struct kvlab_plugin {
  std::uint32_t abi;   // KVLAB_ABI
  std::uint32_t size;  // sizeof(kvlab_plugin)
  const char* build;   // KVLAB_BUILD
  // Returns the roles and their number, or null with a message in err. Never throws. kvlab calls it only if the fields
  // above match.
  const kvlab_role* (*roles)(std::size_t* count, char* err, std::size_t cap);
};

}  // extern "C"

#define KVLAB_ABI 1u
#define KVLAB_ENTRY "kvlab_plugin_entry"  // extern "C" const kvlab_plugin* kvlab_plugin_entry()

#define KVLAB_TEXT_OF_(x) #x
#define KVLAB_TEXT_OF(x) KVLAB_TEXT_OF_(x)
#if defined(__clang__)
#define KVLAB_COMPILER_ \
  "clang " KVLAB_TEXT_OF(__clang_major__) "." KVLAB_TEXT_OF(__clang_minor__) "." KVLAB_TEXT_OF(__clang_patchlevel__)
#else
#define KVLAB_COMPILER_ \
  "gcc " KVLAB_TEXT_OF(__GNUC__) "." KVLAB_TEXT_OF(__GNUC_MINOR__) "." KVLAB_TEXT_OF(__GNUC_PATCHLEVEL__)
#endif
#if defined(_LIBCPP_VERSION)
#define KVLAB_STDLIB_ "libc++ " KVLAB_TEXT_OF(_LIBCPP_VERSION)
#elif defined(_GLIBCXX_DEBUG)
#define KVLAB_STDLIB_ "libstdc++ " KVLAB_TEXT_OF(__GLIBCXX__) " debug mode"
#else
#define KVLAB_STDLIB_ "libstdc++ " KVLAB_TEXT_OF(__GLIBCXX__) " cxx11 abi " KVLAB_TEXT_OF(_GLIBCXX_USE_CXX11_ABI)
#endif
// Names all that decides the layout of the SDK's classes. NDEBUG must not decide it: a release plugin runs in a debug
// build.
#define KVLAB_BUILD KVLAB_COMPILER_ ", " KVLAB_STDLIB_ ", C++ " KVLAB_TEXT_OF(__cplusplus) ", SDK " KVLAB_API_HASH
