// Memory that a policy takes on its stream's device. On a GPU the host may neither read nor write it.
// Scratch lives until the callback returns. Under device_memory, a cap, a callback gets at most 4 numbers for each
// token and query head of the batch, or Needs::scratch_numbers, and head_dim x head_dim numbers for each query head. A
// policy takes state once, in attach; it starts as zeros and lives as long as the run. Core saves, restores and clears
// a slot's state with the sequence. The ledger counts both by tag.
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
  // For attach: returns a copy of host memory, for ops, that lives as long as the run.
  virtual const void* constant(const char* tag, const void* from, std::size_t bytes) = 0;
  // For attach: memory that lives as long as the run, for what one callback leaves to a later one of the same step.
  // Nobody saves or clears it.
  virtual void* room(const char* tag, std::size_t bytes) { return state(tag, bytes, 1); }
  // Returns scratch with a copy of host memory, for later ops on the stream. When it returns, `from` may be changed. A
  // GPU refuses it (Errc::plugin) in decode steps of a policy that promises capturable(true): a graph would repeat one
  // step's numbers.
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
