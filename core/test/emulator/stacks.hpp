// Stacks that take turns on one thread of the CPU.
#pragma once
#include <cstddef>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace emulator {

// Where a stack was left. On x86-64 the stack itself holds the registers.
#ifdef __x86_64__
using Place = void*;
constexpr bool places_move = true;
#else
using Place = ucontext_t;
constexpr bool places_move = false;  // one may point into itself
#endif

// Leaves the running stack, whose place goes to `from`, and goes on at `to`.
void go(Place& from, Place& to);

// Asks for the memory that go() will read there.
inline void prefetch(const Place& place) {
#ifdef __x86_64__
  __builtin_prefetch(place);
#else
  __builtin_prefetch(&place);
#endif
}

// A place on the stack [stack, stack + bytes) from which go() calls entry, which must not return.
void start_at(Place& place, std::byte* stack, std::size_t bytes, void (*entry)());

// A stack of so many bytes, aligned to 64 of them. It stays until the program ends.
std::byte* new_stack(std::size_t bytes);

}  // namespace emulator
