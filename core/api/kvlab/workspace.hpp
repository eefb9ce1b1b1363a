// Memory that a policy may use: where its stream's ops work, so on a GPU nothing that the host may read or write.
// Scratch lives until the callback returns; state is taken once, in attach, is zeroed, belongs to the run and is saved,
// restored and cleared slot by slot with the sequence. Both are counted in the ledger under their tag.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvlab/view.hpp"

namespace kvlab {

class Workspace {
 public:
  virtual ~Workspace() = default;
  virtual void* scratch(const char* tag, std::size_t bytes) = 0;                    // uninitialised, 64-byte aligned
  virtual void* state(const char* tag, std::size_t bytes_per_slot, int slots) = 0;  // [slot, bytes_per_slot]
  // Scratch with a copy of host memory, for ops that the stream is given later; `from` is free when the call returns.
  virtual const void* upload(const char* tag, const void* from, std::size_t bytes) {
    void* to = scratch(tag, bytes);
    if (bytes) std::memcpy(to, from, bytes);
    return to;
  }
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

// A copy of a dense host array where ops read it.
template <class T, std::size_t Rank>
View<const T, static_cast<int>(Rank)> upload(Workspace& w, const char* tag, const T* from,
                                             const std::int64_t (&extent)[Rank]) {
  std::array<std::int64_t, Rank> e{};
  std::size_t count = 1;
  for (std::size_t i = 0; i < Rank; ++i) {
    e[i] = extent[i];
    count *= static_cast<std::size_t>(extent[i]);
  }
  return View<const T, static_cast<int>(Rank)>::dense(static_cast<const T*>(w.upload(tag, from, count * sizeof(T))), e);
}

}  // namespace kvlab
