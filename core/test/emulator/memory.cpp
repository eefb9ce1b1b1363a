// Shared memory, transaction barriers and bulk copies of a block.
#include <kvlab/error.hpp>

#include "block.hpp"

namespace emulator {
namespace {

constexpr std::size_t guard = 256;  // bytes past dynamic shared memory that nobody may write
constexpr std::byte guard_byte{0xb7};

std::uint64_t magic_of(unsigned barrier) { return 0x9e3779b97f4a7c15ull * (barrier + 1ull); }

Barrier& find(Block& b, unsigned address, const char* what) {
  const auto found = b.barriers.find(address);
  if (found == b.barriers.end()) fail(std::string("got ") + what + " on an mbarrier that was not initialised");
  std::uint64_t word;
  std::memcpy(&word, b.memory + address, 8);
  if (word != magic_of(address)) fail(std::string("got ") + what + " on an mbarrier that was written over");
  return found->second;
}

void advance(Block& b, unsigned address, Barrier& barrier) {
  if (barrier.missing > 0 || barrier.bytes != 0) return;
  barrier.missing = barrier.arrivals;
  barrier.phase ^= 1;
  for (std::size_t i = 0; i < b.waiters.size();)
    if (b.waiters[i].barrier == address) {
      const Fiber& f = *b.waiters[i].fiber;
      make_ready(*f.warp, 1u << (f.thread % 32));
      b.waiters[i] = b.waiters.back();
      b.waiters.pop_back();
    } else {
      ++i;
    }
}

void arrive(Block& b, unsigned address, Barrier& barrier) {
  if (barrier.missing == 0) fail("got more arrivals at an mbarrier than it was initialised for");
  --barrier.missing;
  advance(b, address, barrier);
}

}  // namespace

void start_memory(Block& b, std::size_t dynamic_bytes) {
  if (!b.memory) {
    b.room.reset(new std::byte[room_of_block + 4096]);
    b.memory = reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(b.room.get()) + 4095) / 4096 * 4096);
  }
  b.dynamic = 0;
  b.dynamic_bytes = dynamic_bytes;
  b.static_bytes = 0;
  b.statics.clear();
  b.barriers.clear();
  b.copies.clear();
  b.own_copies.clear();
  b.waiters.clear();
  static constexpr int garbage[] = {0xff, 0x7f, 0xcd};
  std::memset(b.memory, garbage[random()() % 3], dynamic_bytes + 2048);
}

void check_memory(const Block& b) {
  for (std::size_t i = 0; b.dynamic && i < guard; ++i)
    if (b.memory[b.dynamic + b.dynamic_bytes + i] != guard_byte)
      fail("got a write " + std::to_string(i) + " bytes past the " + std::to_string(b.dynamic_bytes) +
           " bytes of dynamic shared memory");
}

void* dynamic_shared(std::size_t alignment) {
  Block& b = block();
  if (!b.dynamic) {
    b.dynamic = alignment;
    std::memset(b.memory + alignment + b.dynamic_bytes, static_cast<int>(guard_byte), guard);
  }
  if (b.dynamic != alignment) fail("got dynamic shared memory of two alignments");
  return b.memory + alignment;
}

int new_static_id() {
  static int last = 0;
  return ++last;
}

void* static_shared(int id, std::size_t bytes, std::size_t alignment) {
  Block& b = block();
  for (const auto& [known, place] : b.statics)
    if (known == id) return b.memory + place;
  const std::size_t place = (b.static_bytes + alignment - 1) / alignment * alignment;
  b.static_bytes = place + bytes;
  if (b.static_bytes > static_shared_of_block || b.static_bytes + b.dynamic_bytes > shared_of_block)
    fail("got " + std::to_string(b.static_bytes) + " bytes of static and " + std::to_string(b.dynamic_bytes) +
         " of dynamic shared memory, wanted at most " + std::to_string(static_shared_of_block) + " and " +
         std::to_string(shared_of_block) + " together");
  b.statics.emplace_back(id, static_place + place);
  std::byte* const memory = b.memory + static_place + place;
  std::memset(memory, 0xcd, bytes);
  return memory;
}

unsigned shared_address(const void* p) {
  const auto at = static_cast<const std::byte*>(p) - block().memory;
  if (at < 0 || at >= static_cast<std::ptrdiff_t>(room_of_block)) fail("got an address that is not in shared memory");
  return static_cast<unsigned>(at);
}

void* shared_memory(unsigned address, std::size_t bytes, std::size_t alignment) {
  Block& b = block();
  const bool dynamic = address >= b.dynamic && address + bytes <= b.dynamic + b.dynamic_bytes,
             fixed = address >= static_place && address + bytes <= static_place + b.static_bytes;
  if (!dynamic && !fixed) fail("got an access past the end of shared memory");
  if (address % alignment) fail("got an access of " + std::to_string(bytes) + " misaligned bytes of shared memory");
  return b.memory + address;
}

void barrier_init(unsigned address, unsigned arrivals) {
  const std::uint64_t magic = magic_of(address);
  std::memcpy(shared_memory(address, 8, 8), &magic, 8);
  if (arrivals == 0) fail("got an mbarrier of no arrivals");
  block().barriers[address] = {arrivals, arrivals, 0, 0};
}

void barrier_expect(unsigned address, unsigned bytes) {
  Block& b = block();
  Barrier& barrier = find(b, address, "expect_tx");
  barrier.bytes += bytes;
  arrive(b, address, barrier);
}

void barrier_arrive(unsigned address) {
  Block& b = block();
  arrive(b, address, find(b, address, "an arrival"));
}

void barrier_wait(unsigned address, unsigned parity) {
  Block& b = block();
  while (find(b, address, "a wait").phase == (parity & 1)) {
    b.waiters.push_back({&fiber(), address});
    leave();
  }
}

void bulk_copy(unsigned to, const Box& box, int x, int y, unsigned address) {
  Block& b = block();
  find(b, address, "a bulk copy");
  const std::size_t bytes = std::size_t{128} * static_cast<std::size_t>(box.box_rows);
  std::memset(shared_memory(to, bytes, 128), 0xff, bytes);
  b.copies.push_back({to, address, box, x, y});
}

void copy_async(unsigned to, const void* from) {
  std::memset(shared_memory(to, 16, 16), 0xff, 16);
  block().own_copies.push_back({now.thread.x, to, from});
}

void wait_copies() {
  std::erase_if(block().own_copies, [&](const OwnCopy& c) {
    if (c.thread != now.thread.x) return false;
    std::memcpy(shared_memory(c.to, 16, 16), c.from, 16);
    return true;
  });
}

void bulk_load(unsigned to, const void* from, unsigned bytes, unsigned address) {
  Block& b = block();
  find(b, address, "a bulk load");
  if (bytes % 16 || reinterpret_cast<std::uintptr_t>(from) % 16)
    fail("got a bulk load that is not of units of 16 bytes");
  std::memset(shared_memory(to, bytes, 16), 0xff, bytes);
  Copy c{};
  c.to = to, c.barrier = address, c.from = static_cast<const std::byte*>(from), c.bytes = bytes;
  b.copies.push_back(c);
}

void bulk_store(void* to, unsigned from, unsigned bytes) {
  if (bytes % 16 || reinterpret_cast<std::uintptr_t>(to) % 16)
    fail("got a bulk store that is not of units of 16 bytes");
  shared_memory(from, bytes, 16);
  block().own_stores.push_back({now.thread.x, from, bytes, static_cast<std::byte*>(to)});
}

void commit_stores() {
  Block& b = block();
  const int group = b.store_groups[now.thread.x]++;
  for (OwnStore& s : b.own_stores)
    if (s.thread == now.thread.x && s.group < 0) s.group = group;
}

void wait_stores(int groups_left, bool written) {
  Block& b = block();
  const int done = b.store_groups[now.thread.x] - groups_left;
  for (OwnStore& s : b.own_stores) {
    if (s.thread != now.thread.x || s.group < 0 || s.group >= done || !s.data.empty()) continue;
    const auto* bytes = static_cast<const std::byte*>(shared_memory(s.from, s.bytes, 16));
    s.data.assign(bytes, bytes + s.bytes);
  }
  if (!written) return;
  std::erase_if(b.own_stores, [&](const OwnStore& s) {
    if (s.thread != now.thread.x || s.group < 0 || s.group >= done) return false;
    std::memcpy(s.to, s.data.data(), s.bytes);
    return true;
  });
}

void land(Block& b, std::size_t at) {
  const Copy c = b.copies[at];
  b.copies[at] = b.copies.back();
  b.copies.pop_back();
  if (c.from) {
    std::memcpy(b.memory + c.to, c.from, c.bytes);
    Barrier& barrier = find(b, c.barrier, "the end of a bulk load");
    barrier.bytes -= c.bytes;
    return advance(b, c.barrier, barrier);
  }
  for (int row = 0; row < c.box.box_rows; ++row)
    for (unsigned piece = 0; piece < 8; ++piece) {
      const unsigned place = c.to + static_cast<unsigned>(row) * 128 + piece * 16,
                     swizzled = place ^ (place >> 3 & 0x70);
      const std::int64_t y = std::int64_t{c.y} + row, x = std::int64_t{c.x} + piece * 8;
      std::uint16_t values[8] = {};
      if (y >= 0 && y < c.box.rows)
        for (int e = 0; e < 8; ++e)
          if (x + e >= 0 && x + e < c.box.columns)
            std::memcpy(&values[e], c.box.base + (y * c.box.row_stride + x + e) * 2, 2);
      std::memcpy(b.memory + swizzled, values, 16);
    }
  Barrier& barrier = find(b, c.barrier, "the end of a bulk copy");
  barrier.bytes -= 128 * c.box.box_rows;
  advance(b, c.barrier, barrier);
}

}  // namespace emulator
