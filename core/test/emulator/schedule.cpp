#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <deque>
#include <kvlab/error.hpp>
#include <utility>

#include "block.hpp"

namespace emulator {

Now now;
std::byte* parts = nullptr;  // of the lanes of the warp that runs

namespace {

constexpr std::size_t stack_bytes = 65536 + 832;  // not a power of two: stacks spread over the sets of a cache
constexpr int most_at_once = 4;                   // blocks, unless blocks wait for others
constexpr int most_waits = 1 << 20;               // one after the other, before a launch counts as stuck
constexpr std::size_t stack_mark_bytes = 64;
constexpr auto stack_mark = [] {
  std::array<unsigned char, stack_mark_bytes> mark{};
  mark.fill(0x5a);
  return mark;
}();

struct Failure {
  std::string what;
};

Place scheduler;
Fiber* current = nullptr;  // null: the scheduler runs
const Launch* launch = nullptr;
const std::function<void()>* body = nullptr;
std::vector<Warp*> runnable;
std::string failure;
bool failed = false;
int waits = 0;  // for other blocks, since the latest block began
unsigned seed = 1;

inline void resume(Fiber& f, Place& from) {
  current = &f;
  f.fresh = false;
  now.thread.x = f.thread;
  go(from, f.place);
}

inline int first_lane(const Warp& warp) {
  return warp.backwards ? 31 - std::countl_zero(warp.ready) : std::countr_zero(warp.ready);
}
// The warp's next lane that can run.
inline Fiber& take_lane(Warp& warp) {
  const int lane = first_lane(warp);
  warp.ready &= ~(1u << lane);
  return warp.fibers[lane];
}

// The thread has ended. If the next one has not begun, it takes over this stack, which is in the cache, and leaves its
// own.
void finish() {
  Fiber& f = *current;
  Warp& warp = *f.warp;
  ++warp.block->done;
  f.usable = true;
  if (!places_move || !warp.ready || !warp.fibers[first_lane(warp)].fresh) return leave();
  Fiber& next = take_lane(warp);
  std::swap(f.place, next.place);
  std::swap(f.stack, next.stack);
  next.fresh = false;
  current = &next;
  now.thread.x = next.thread;
}

void entry() {
  for (;;) {
    (*body)();
    finish();
  }
}

void create(Fiber& f) {
  if (!f.stack) f.stack = new_stack(stack_bytes);
  std::memcpy(f.stack, stack_mark.data(), stack_mark_bytes);
  start_at(f.place, f.stack, stack_bytes, entry);
  f.usable = true;
}

void start(Block& b, dim3 index) {
  b.active = true;
  b.index = index;
  b.threads = launch->block.x;
  b.done = b.at_barrier = 0;
  b.any = b.waited = false;
  start_memory(b, launch->shared);
  const std::size_t warps = (b.threads + 31) / 32;
  while (b.warps.size() < warps) b.warps.push_back(std::make_unique<Warp>());
  b.waiting_at_barrier.assign(warps, 0);
  for (unsigned t = 0; t < b.threads; ++t) {
    Fiber& f = b.fiber(t);
    f.warp = b.warps[t / 32].get();
    f.thread = t;
    if (!f.usable) create(f);
    f.usable = false;
    f.fresh = true;
  }
  for (unsigned w = 0; w < warps; ++w) {
    Warp& warp = *b.warps[w];
    warp.block = &b;
    warp.first = w * 32;
    warp.met = 0;
    const unsigned lanes = std::min(32u, b.threads - w * 32);
    make_ready(warp, lanes == 32 ? ~0u : (1u << lanes) - 1);
  }
}

std::string place(const Block& b) {
  return launch->kernel + ", block (" + std::to_string(b.index.x) + ", " + std::to_string(b.index.y) + ", " +
         std::to_string(b.index.z) + ")";
}

[[noreturn]] void stop(const std::string& message, std::deque<Block>& blocks) {
  for (Block& b : blocks) {
    b.active = false;
    for (auto& w : b.warps) {
      w->listed = false, w->ready = 0;
      for (Fiber& f : w->fibers) f.usable = false;
    }
  }
  runnable.clear();
  failed = false;
  throw kvlab::Error(kvlab::Errc::device, message + " (seed " + std::to_string(seed) + ")",
                     "emulated " + launch->kernel);
}

std::string stuck(const std::deque<Block>& blocks) {
  for (const Block& b : blocks) {
    if (!b.active) continue;
    std::string text = "nothing can go on in " + place(b) + ": of " + std::to_string(b.threads) + " threads " +
                       std::to_string(b.done) + " have ended, " + std::to_string(b.at_barrier) +
                       " are at __syncthreads, " + std::to_string(b.waiters.size()) + " wait for an mbarrier";
    for (std::size_t w = 0; w < b.waiting_at_barrier.size(); ++w)
      if (const Warp& warp = *b.warps[w]; warp.met > 0)
        text += "; " + std::to_string(warp.met) + " lanes of warp " + std::to_string(w) + " are at " + warp.what;
    return text;
  }
  return "nothing can go on";
}

void end(Block& b) {
  if (!b.copies.empty())
    fail("got " + std::to_string(b.copies.size()) + " bulk copies under way at the end of " + place(b));
  if (!b.own_copies.empty())
    fail("got " + std::to_string(b.own_copies.size()) + " copies that nobody waited for at the end of " + place(b));
  if (!b.own_stores.empty())
    fail("got " + std::to_string(b.own_stores.size()) + " bulk stores that nobody waited for at the end of " +
         place(b));
  if (launch->early && !b.waited) fail("got no wait for the kernel in front in " + place(b));
  for (unsigned t = 0; t < b.threads; ++t)
    if (std::memcmp(b.fiber(t).stack, stack_mark.data(), stack_mark_bytes) != 0)
      fail("got a thread that needs more stack than the emulator has in " + place(b));
  check_memory(b);
  b.active = false;
}

}  // namespace

Block& block() { return *current->warp->block; }
Fiber& fiber() { return *current; }
std::mt19937& random() {
  static std::mt19937 all = [] {
    if (const char* text = std::getenv("KVLAB_EMULATED_SEED")) seed = static_cast<unsigned>(std::atoi(text));
    return std::mt19937(seed);
  }();
  return all;
}

void fail(const std::string& what) {
  if (!current) throw Failure{what};
  failure = what;
  failed = true;
  go(current->place, scheduler);
  std::abort();  // nobody resumes a thread that failed
}

void make_ready(Warp& warp, std::uint32_t lanes) {
  if (!lanes) return;
  warp.ready |= lanes;
  if (warp.listed) return;
  warp.listed = true;
  warp.backwards = random()() % 2;
  runnable.push_back(&warp);
}

void leave() {
  Fiber& self = *current;
  Warp& warp = *self.warp;
  if (!warp.ready) return go(self.place, scheduler);
  Fiber& next = take_lane(warp);
  // Another stack is seldom in the cache. The lane after the next one asks for its stack now.
  if (warp.ready) prefetch(warp.fibers[first_lane(warp)].place);
  resume(next, self.place);
}

void pause() {
  if (random()() % 4) return;
  current->warp->ready |= 1u << (current->thread % 32);
  go(current->place, scheduler);
}

void wait_for_others() {
  ++waits;
  current->warp->ready |= 1u << (current->thread % 32);
  go(current->place, scheduler);
}

void* bring(std::size_t bytes) { return parts + bytes * (now.thread.x % 32); }

const void* meet(const char* what, unsigned mask, Combine combine) {
  Warp& warp = *current->warp;
  if (mask != ~0u) fail(std::string("got a mask of fewer than 32 lanes for ") + what + ", which the emulator has not");
  if (warp.met > 0 && warp.what != what && std::strcmp(warp.what, what) != 0)
    fail("got lanes of one warp at " + std::string(warp.what) + " and at " + what + " in " + place(*warp.block));
  warp.what = what;
  if (++warp.met < 32) {
    leave();
    return warp.out;
  }
  warp.met = 0;
  combine(warp.in, warp.out);
  warp.backwards = !warp.backwards;
  make_ready(warp, ~0u & ~(1u << (current->thread % 32)));
  pause();
  return warp.out;
}

bool meet_block(bool value) {
  Block& b = block();
  b.any |= value;
  if (++b.at_barrier < b.threads) {
    b.waiting_at_barrier[current->thread / 32] |= 1u << (current->thread % 32);
    leave();
    return b.any_before;
  }
  b.at_barrier = 0;
  b.any_before = b.any;
  b.any = false;
  for (std::size_t w = 0; w < b.waiting_at_barrier.size(); ++w)
    make_ready(*b.warps[w], std::exchange(b.waiting_at_barrier[w], 0));
  return b.any_before;
}

void waited_for_predecessor() { block().waited = true; }

void run(const Launch& l, const std::function<void()>& thread) {
  static std::deque<Block> blocks(most_at_once);
  launch = &l;
  body = &thread;
  now.block_dim = l.block, now.grid_dim = l.grid;
  std::vector<std::uint64_t> order(std::uint64_t{l.grid.x} * l.grid.y * l.grid.z);
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random());
  const std::size_t at_once = 1 + random()() % most_at_once;
  std::size_t next = 0;
  const auto refill = [&](Block& b) {
    if (next == order.size()) return;
    const std::uint64_t i = order[next++];
    start(b, dim3(static_cast<unsigned>(i % l.grid.x), static_cast<unsigned>(i / l.grid.x % l.grid.y),
                  static_cast<unsigned>(i / l.grid.x / l.grid.y)));
  };
  for (std::size_t i = 0; i < at_once; ++i) refill(blocks[i]);
  waits = 0;
  for (;;) try {
      if (waits > 0 && waits % 64 == 0 && next < order.size()) {
        const auto idle = std::find_if(blocks.begin(), blocks.end(), [](const Block& b) { return !b.active; });
        refill(idle != blocks.end() ? *idle : blocks.emplace_back());
        waits = 0;
      }
      if (waits > most_waits) stop("blocks wait for others that never come", blocks);
      if (runnable.empty() || random()() % 16 == 0) {
        std::vector<Block*> with_copies;
        for (Block& b : blocks)
          if (b.active && !b.copies.empty()) with_copies.push_back(&b);
        if (!with_copies.empty()) {
          Block& b = *with_copies[random()() % with_copies.size()];
          land(b, random()() % b.copies.size());
          continue;
        }
        if (runnable.empty()) {
          if (std::none_of(blocks.begin(), blocks.end(), [](const Block& b) { return b.active; })) return;
          stop(stuck(blocks), blocks);
        }
      }
      const std::size_t chosen = random()() % runnable.size();
      Warp& warp = *runnable[chosen];
      Block& b = *warp.block;
      now.block = b.index;
      parts = warp.in;
      resume(take_lane(warp), scheduler);
      current = nullptr;
      if (failed) stop(failure, blocks);
      if (!warp.ready) {
        warp.listed = false;
        const auto at = std::find(runnable.begin(), runnable.end(), &warp);
        *at = runnable.back();
        runnable.pop_back();
      }
      if (b.done == b.threads) {
        end(b);
        refill(b);
      }
    } catch (const Failure& f) {
      stop(f.what, blocks);
    }
}

}  // namespace emulator
