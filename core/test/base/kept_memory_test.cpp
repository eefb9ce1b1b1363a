#include "base/kept_memory.hpp"

#include <catch2/catch.hpp>
#include <cstring>
#include <kvlab/error.hpp>
#include <vector>

using namespace kvlab;

namespace {

std::size_t in_use = 0;  // pieces
std::vector<void*> waits;
bool room = true, zeroing_fails = false;

KeptMemory::Device host() {
  in_use = 0, waits.clear(), room = true, zeroing_fails = false;
  KeptMemory::Device d;
  d.allocate = [](std::size_t bytes) -> void* {
    if (!room) return nullptr;
    ++in_use;
    return std::memset(::operator new(bytes), 0xa5, bytes);
  };
  d.free = [](void* p) { ::operator delete(p), --in_use; };
  d.free_bytes = [] { return std::size_t{7}; };
  d.zero = [](void* p, std::size_t bytes, void*) {
    if (zeroing_fails) throw Error(Errc::device, "lost", "test");
    std::memset(p, 0, bytes);
  };
  d.wait = [](void* stream) { waits.push_back(stream); };
  return d;
}

int streams[2];  // their addresses stand for two streams
void* const one = streams;
void* const other = streams + 1;

}  // namespace

TEST_CASE("kept memory: the same until it is too little") {
  KeptMemory kept(host());
  auto* counter = static_cast<unsigned char*>(kept.get(one, "counters", 64, true));
  CHECK(counter[0] == 0);
  CHECK(counter[63] == 0);
  counter[5] = 9;
  CHECK(kept.get(one, "counters", 32, true) == counter);
  CHECK(counter[5] == 9);
  CHECK(kept.get(other, "counters", 64, true) != counter);
  CHECK(static_cast<unsigned char*>(kept.get(one, "partial", 64, false))[0] == 0xa5);
  CHECK(kept.moves() == 0);
  waits.clear();
  counter = static_cast<unsigned char*>(kept.get(one, "counters", 65, true));
  CHECK(waits == std::vector<void*>{one});
  CHECK(counter[5] == 0);
  CHECK(kept.moves() == 1);
  CHECK(in_use == 3);
  kept.drop(one), kept.drop(other);
}

TEST_CASE("kept memory: a stream that is gone leaves nothing to one of the same address") {
  KeptMemory kept(host());
  static_cast<unsigned char*>(kept.get(one, "counters", 64, true))[5] = 9;  // as a failed kernel leaves it
  kept.get(one, "partial", 640, false);
  void* stays = kept.get(other, "counters", 64, true);
  kept.drop(one);
  CHECK(in_use == 1);
  CHECK(kept.moves() == 0);
  CHECK(kept.get(other, "counters", 64, true) == stays);
  CHECK(static_cast<unsigned char*>(kept.get(one, "counters", 64, true))[5] == 0);
  kept.drop(other);
  kept.drop(other);
  kept.drop(one);
  CHECK(in_use == 0);
}

TEST_CASE("kept memory: what failed is as if it had not been asked for") {
  KeptMemory kept(host());
  room = false;
  CHECK_THROWS_WITH(kept.get(one, "counters", 64, true), "got 7 free bytes of GPU memory, wanted 64 more");
  kept.drop(one);
  room = true, zeroing_fails = true;
  CHECK_THROWS_AS(kept.get(one, "counters", 64, true), Error);
  zeroing_fails = false;
  CHECK(static_cast<unsigned char*>(kept.get(one, "counters", 64, true))[5] == 0);
  CHECK(in_use == 1);
  kept.drop(one);
  CHECK(in_use == 0);
}
