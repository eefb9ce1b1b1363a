#include "stacks.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <utility>

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

// Thousands of stacks take turns. On large pages their places fit the processor's table of addresses. Large pages take
// memory that no stack uses, so only the first 256 MiB have them. The blocks that usually run at once need less.
std::byte* new_stack(std::size_t bytes) {
  constexpr std::size_t large_page = std::size_t{2} << 20, at_once = 4 * large_page, most_large = 32 * at_once;
  static std::byte *next = nullptr, *end = nullptr;
  static std::size_t large = 0;
  bytes = (bytes + 63) / 64 * 64;
  if (next == nullptr || static_cast<std::size_t>(end - next) < bytes) {
    void* room = mmap(nullptr, at_once + large_page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED) throw std::bad_alloc();
    next = reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(room) + large_page - 1) / large_page *
                                        large_page);
    end = next + at_once;
    if (large < most_large) large += at_once, madvise(next, at_once, MADV_HUGEPAGE);
  }
  return std::exchange(next, next + bytes);
}

}  // namespace emulator
