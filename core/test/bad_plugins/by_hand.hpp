// Pieces of a plugin library that does not come from KVLAB_PLUGIN.
#pragma once
#include <kvlab/plugin.hpp>

#include <cstdlib>

// The callback of roles in a library that the loader must refuse before it asks for them.
inline const kvlab_role* never(std::size_t*, char*, std::size_t) { std::abort(); }

struct Nothing final : kvlab::Budget {
  void allot(const kvlab::Allotment&, kvlab::Stream) override {}
};

// A correct role, which BAD_ROLE spoils.
inline kvlab_role sound_role() {
  return {"by_hand",
          kvlab::Role::budget,
          "1",
          "help",
          nullptr,
          0,
          &kvlab::detail::create<kvlab::Budget, Nothing>,
          &kvlab::detail::destroy<kvlab::Budget>};
}

// The entry of a library whose description is the four values given.
#define BAD_PLUGIN(...)                                              \
  extern "C" KVLAB_EXPORT const kvlab_plugin* kvlab_plugin_entry() { \
    static const kvlab_plugin plugin{__VA_ARGS__};                   \
    return &plugin;                                                  \
  }

// The entry of a library with one role, made by sound_role() and then spoiled by the statements given.
#define BAD_ROLE(...)                                                        \
  static const kvlab_role* spoiled(std::size_t* count, char*, std::size_t) { \
    static kvlab_role role = sound_role();                                   \
    __VA_ARGS__;                                                             \
    *count = 1;                                                              \
    return &role;                                                            \
  }                                                                          \
  BAD_PLUGIN(KVLAB_ABI, sizeof(kvlab_plugin), KVLAB_BUILD, &spoiled)
