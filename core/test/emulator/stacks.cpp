#include "stacks.hpp"

#include <cstdint>
#include <cstring>

namespace emulator {

#ifdef __x86_64__

// Keeps only the registers that a called function keeps. setjmp and longjmp take three times as long, and a kernel's
// threads switch in every exchange of lanes.
[[gnu::naked, gnu::noinline]] void go(Place&, Place&) {
  asm(R"(
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq (%rsi), %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
  )");
}

void start_at(Place& place, std::byte* stack, std::size_t bytes, void (*entry)()) {
  constexpr std::size_t registers = 6;
  // A function begins with the stack 8 bytes past a multiple of 16: its caller's place to return to lies there.
  const auto top = (reinterpret_cast<std::uintptr_t>(stack) + bytes) / 16 * 16 - 16;
  auto* const words = reinterpret_cast<void**>(top) - registers;
  std::memset(words, 0, registers * sizeof(void*));
  words[registers] = reinterpret_cast<void*>(entry);
  words[registers + 1] = nullptr;
  place = words;
}

#else

void go(Place& from, Place& to) { swapcontext(&from, &to); }

void start_at(Place& place, std::byte* stack, std::size_t bytes, void (*entry)()) {
  getcontext(&place);
  place.uc_stack.ss_sp = stack;
  place.uc_stack.ss_size = bytes;
  place.uc_link = nullptr;
  makecontext(&place, entry, 0);
}

#endif

}  // namespace emulator
