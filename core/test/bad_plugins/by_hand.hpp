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

struct SpoiledNote {
  template <class Out>
  constexpr void put(Out& out) const {
    kvlab::detail::put_head(out, abi, size, build);
    kvlab::detail::put_number(out, 0, 1);
  }
  std::uint32_t abi = KVLAB_ABI;
  std::size_t size = sizeof(kvlab_plugin);
  const char* build = KVLAB_BUILD;
};

// A library whose note has the values given. Its constructor ends the process, so the loader must read the note first.
#define BAD_NOTE(...)                              \
  struct Note final : SpoiledNote {                \
    constexpr Note() : SpoiledNote{__VA_ARGS__} {} \
  };                                               \
  KVLAB_NOTE_ = kvlab::detail::note_of<Note>();    \
  [[gnu::constructor]] static void crash() { std::abort(); }

// The entry of a library with a sound note whose description is the four values given.
#define BAD_PLUGIN(...)                                              \
  KVLAB_NOTE_ = kvlab::detail::note_of<SpoiledNote>();               \
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
