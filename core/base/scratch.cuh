// Scratch that a captured graph may go on using: it never moves when a later call needs more.
#pragma once
#include <bit>
#include <string>

#include "base/cuda.cuh"

namespace kvlab::cuda {

// Uninitialised memory that is kept for the stream. `bytes` is rounded up to a power of two; each has its own buffer.
inline void* fixed_scratch(void* stream, const char* tag, std::size_t bytes) {
  const std::size_t room = std::bit_ceil(bytes);
  return kept(stream, (std::string(tag) + " " + std::to_string(room)).c_str(), room);
}
// The same, zero at first. Every user leaves it zero.
inline void* zeroed_scratch(void* stream, const char* tag, std::size_t bytes) {
  const std::size_t room = std::bit_ceil(bytes);
  return zeroed(stream, (std::string(tag) + " " + std::to_string(room)).c_str(), room);
}

}  // namespace kvlab::cuda
