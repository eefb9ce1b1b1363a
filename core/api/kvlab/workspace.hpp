// Memory that a policy may use. Scratch lives until the callback returns; state is taken once, in attach, is zeroed,
// belongs to the run and is saved, restored and cleared slot by slot with the sequence. Both are counted in the ledger
// under their tag.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

#include "kvlab/view.hpp"

namespace kvlab {

class Workspace {
 public:
  virtual ~Workspace() = default;
  virtual void* scratch(const char* tag, std::size_t bytes) = 0;                    // uninitialised, 64-byte aligned
  virtual void* state(const char* tag, std::size_t bytes_per_slot, int slots) = 0;  // [slot, bytes_per_slot]
};

template <class T, std::size_t Rank>
View<T, static_cast<int>(Rank)> take_scratch(Workspace& w, const char* tag, const std::int64_t (&extent)[Rank]) {
  std::array<std::int64_t, Rank> e{};
  std::size_t count = 1;
  for (std::size_t i = 0; i < Rank; ++i) {
    e[i] = extent[i];
    count *= static_cast<std::size_t>(extent[i]);
  }
  return View<T, static_cast<int>(Rank)>::dense(static_cast<T*>(w.scratch(tag, count * sizeof(T))), e);
}

}  // namespace kvlab
