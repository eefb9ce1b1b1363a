// Blocks under way and the fibers that are their threads.
#pragma once
#include <memory>
#include <random>
#include <unordered_map>
#include <vector>

#include "emulator.hpp"
#include "stacks.hpp"

namespace emulator {

struct Block;
struct Warp;

struct Fiber {
  Place place;
  Warp* warp = nullptr;
  unsigned thread = 0;
  std::byte* stack = nullptr;
  bool usable = false;  // waits at the end of a kernel for the next one
  bool fresh = false;   // has not run since its block began
};

struct Warp {
  Block* block = nullptr;
  unsigned first = 0;       // index of its first thread in the block
  std::uint32_t ready = 0;  // lanes that can run
  int met = 0;
  const char* what = nullptr;  // the operation that lanes have come to
  bool listed = false, backwards = false;
  Fiber fibers[32];  // of its lanes: by value, as they take turns all the time
  alignas(64) std::byte in[32 * most_bytes_of_lane], out[32 * most_bytes_of_lane];
};

struct Barrier {
  unsigned arrivals = 0, missing = 0, phase = 0;
  std::int64_t bytes = 0;
};

struct Copy {
  unsigned to, barrier;
  Box box;
  int x, y;
  const std::byte* from = nullptr;  // of a bulk_load, which has no box
  unsigned bytes = 0;
};

struct OwnStore {
  unsigned thread, from, bytes;
  std::byte* to;
  int group = -1;               // -1: not committed yet
  std::vector<std::byte> data;  // read already
};

struct OwnCopy {
  unsigned thread, to;
  const void* from;
};

struct Waiter {
  Fiber* fiber;
  unsigned barrier;
};

struct Block {
  bool active = false, any = false, any_before = false, waited = false;
  dim3 index;
  unsigned threads = 0, done = 0, at_barrier = 0;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<std::uint32_t> waiting_at_barrier;  // [warp], a bit per lane

  std::byte* memory = nullptr;  // 4096-aligned
  std::unique_ptr<std::byte[]> room;
  std::size_t dynamic = 0, dynamic_bytes = 0, static_bytes = 0;
  std::vector<std::pair<int, std::size_t>> statics;  // id and place; a kernel has few

  Fiber& fiber(unsigned thread) const { return warps[thread / 32]->fibers[thread % 32]; }

  std::unordered_map<unsigned, Barrier> barriers;
  std::vector<Copy> copies;
  std::vector<OwnCopy> own_copies;
  std::vector<OwnStore> own_stores;
  std::unordered_map<unsigned, int> store_groups;  // of a thread
  std::vector<Waiter> waiters;
};

constexpr std::size_t static_place = 256 * 1024, room_of_block = static_place + static_shared_of_block + 8192;

Block& block();  // of the thread that runs
Fiber& fiber();  // that of the same thread
std::mt19937& random();
void make_ready(Warp& warp, std::uint32_t lanes);
void leave();                           // until make_ready() names this thread
void land(Block& b, std::size_t copy);  // completes a bulk copy
void start_memory(Block& b, std::size_t dynamic_bytes);
void check_memory(const Block& b);  // fails if something was written past its end

}  // namespace emulator
