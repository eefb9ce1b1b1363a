// Memory: limits are values, freed memory goes back to the operating system, and slots are used again.
#include <kvlab/error.hpp>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <random>

#include "base/memory_map.hpp"
#include "support/store_fixture.hpp"

using namespace kvlab;
using test::Lists;
using test::StoreFixture;

TEST_CASE("an arena hands out frames of several sizes that do not overlap, and gives empty extents back") {
  Arena arena(4 << 20, -1);
  std::vector<std::pair<std::int32_t, std::int64_t>> held;
  for (int i = 0; i < 300; ++i)
    for (std::int64_t bytes : {std::int64_t{128}, std::int64_t{384}, std::int64_t{4096}}) {
      const std::int32_t frame = arena.allocate(bytes);
      REQUIRE(frame != null_frame);
      std::memset(arena.at(frame), static_cast<int>(held.size() & 0xff), static_cast<std::size_t>(bytes));
      held.emplace_back(frame, bytes);
    }
  CHECK(arena.held() == 300 * (128 + 384 + 4096));
  for (std::size_t i = 0; i < held.size(); ++i)
    for (std::int64_t b = 0; b < held[i].second; b += 63) REQUIRE(arena.at(held[i].first)[b] == std::byte(i & 0xff));
  CHECK_THROWS_AS(arena.free(held[0].first, 256), Error);
  arena.free(held[0].first, 128);
  CHECK_THROWS_AS(arena.free(held[0].first, 128), Error);  // twice
  CHECK(arena.allocate(128) == held[0].first);             // lowest first
  CHECK_THROWS_AS(arena.allocate(100), Error);
  CHECK_THROWS_AS(arena.allocate(Arena::extent_bytes + 128), Error);
  for (const auto& [frame, bytes] : held) arena.free(frame, bytes);
  CHECK(arena.held() == 0);
}

TEST_CASE("frames keep their bytes while others of any size come and go, and empty extents change their size") {
  Arena arena(8 << 20, -1);
  struct Frame {
    std::int32_t at;
    std::int64_t bytes;
    std::byte mark;
  };
  std::vector<Frame> held;
  std::mt19937 random(3);
  std::int64_t total = 0;
  const auto intact = [&](const Frame& f) {
    const std::byte* from = arena.at(f.at);
    return std::all_of(from, from + f.bytes, [&](std::byte b) { return b == f.mark; });
  };
  const auto give_back = [&](std::size_t i) {
    REQUIRE(intact(held[i]));
    arena.free(held[i].at, held[i].bytes);
    total -= held[i].bytes;
    held[i] = held.back();
    held.pop_back();
  };
  for (int round = 0; round < 40; ++round) {
    // Every round prefers another size. Every fifth round frees everything.
    for (int i = 0; i < 60; ++i) {
      const std::int64_t bytes = 128 << (random() % 4 ? round % 9 : static_cast<int>(random() % 9));
      const std::int32_t at = arena.allocate(bytes);
      REQUIRE(at != null_frame);
      held.push_back({at, bytes, std::byte(random() & 0xff)});
      std::fill_n(arena.at(at), bytes, held.back().mark);
      total += bytes;
    }
    CHECK(arena.held() == total);
    const std::size_t stay = round % 5 == 4 ? 0 : random() % held.size();
    while (held.size() > stay) give_back(random() % held.size());
  }
  CHECK(arena.held() == 0);
}

TEST_CASE("tests run with poison: a frame reads as NaN when it is freed and when it is taken") {
  REQUIRE(poison_frames());  // set by catch_main.cpp
  Arena arena(1 << 20, -1);
  const auto nan_only = [&](std::int32_t frame) {
    std::vector<float> x(64);
    std::memcpy(x.data(), arena.at(frame), 256);
    return std::all_of(x.begin(), x.end(), [](float v) { return std::isnan(v); });
  };
  const std::int32_t first = arena.allocate(256), second = arena.allocate(256);  // holds their extent
  CHECK(nan_only(first));
  std::memset(arena.at(first), 0, 256);
  std::memset(arena.at(second), 0, 256);
  arena.free(first, 256);
  CHECK(nan_only(first));
  CHECK_FALSE(nan_only(second));
  std::memset(arena.at(first), 0, 256);
  REQUIRE(arena.allocate(256) == first);
  CHECK(nan_only(first));
  arena.free(first, 256);
  arena.free(second, 256);
  CHECK(nan_only(arena.allocate(256)));  // its extent had gone back to the operating system
}

TEST_CASE("a limit is kept to the byte") {
  Arena arena(1 << 20, 1280);
  std::vector<std::int32_t> frames;
  for (int i = 0; i < 5; ++i) frames.push_back(arena.allocate(256));
  CHECK(std::count(frames.begin(), frames.end(), null_frame) == 0);
  CHECK(arena.allocate(128) == null_frame);
  arena.free(frames[3], 256);
  CHECK(arena.allocate(384) == null_frame);
  CHECK(arena.allocate(128) != null_frame);
}

TEST_CASE("resident memory falls when a sequence closes and when tokens leave") {
  StoreFixture f;
  f.options.shape.page_size = 16;
  f.options.shape.head_dim = 64;
  f.inv_freq = test::test_inv_freq(64);
  f.options.rope_table = {f.inv_freq.data(), 64, 1.f};
  f.options.shape.max_tokens = 16384;
  f.options.summary = Summary::min_max;
  CpuStore store(f.options);
  const int slot = store.open();
  const std::int64_t before = resident_bytes();
  std::vector<float> zero(16384 * 2 * 64);
  const std::int64_t filled_by = resident_bytes();
  for (int layer = 0; layer < 2; ++layer)
    REQUIRE(store.append(layer, slot, zero.data(), zero.data(), 16384, 0) == Fit::ok);
  store.advance(slot, 16384, false);
  const std::int64_t full = resident_bytes(), held = store.ledger().total(Tier::device);
  CHECK(full - filled_by > 33 << 20);  // 2 layers x 2 heads x 16384 tokens x 2 x 64 f32
  std::vector<std::int32_t> kept;
  for (int t = 0; t < 16384; t += 4) kept.push_back(t);
  const Lists l(2, kept);
  for (int layer = 0; layer < 2; ++layer) {
    Edits e(layer);
    e.evict_rest(l.tokens());
    store.apply(e.all(), {slot});
  }
  const std::int64_t quarter = resident_bytes(), gone = held - store.ledger().total(Tier::device);
  CHECK(static_cast<double>(full - quarter) > 0.85 * static_cast<double>(gone));
  store.check_invariants();
  store.close(slot);
  store.check_invariants();
  CHECK(resident_bytes() - before < (8 << 20) + static_cast<std::int64_t>(zero.size() * 4));
}

TEST_CASE("an arena that keeps its memory gives it to later frames, and none goes back before the arena does") {
  constexpr std::int64_t bytes = 32 << 20;
  for (const bool keeps : {false, true}) {
    Arena arena(bytes, -1, keeps);
    const std::int64_t before = resident_bytes();
    for (const std::int64_t frame : {4096, 8192}) {  // the same extents for frames of another size
      std::vector<std::int32_t> frames;
      for (std::int64_t taken = 0; taken < bytes; taken += frame) frames.push_back(arena.allocate(frame));
      REQUIRE(std::ranges::count(frames, null_frame) == 0);
      for (const std::int32_t f : frames) std::memset(arena.at(f), 1, static_cast<std::size_t>(frame));
      for (const std::int32_t f : frames) arena.free(f, frame);
      CHECK(arena.held() == 0);
      const std::int64_t resident = resident_bytes() - before;
      if (keeps)
        CHECK((resident > bytes * 7 / 8 && resident < bytes * 9 / 8));
      else
        CHECK(resident < bytes / 8);
    }
  }
}

TEST_CASE("pages take the bits of bf16 rows where they store bf16, and the rows themselves elsewhere") {
  const auto [dtype, bits] =
      GENERATE(table<DType, std::uint8_t>({{DType::bf16, 0}, {DType::bf16, 8}, {DType::f32, 0}}));
  StoreFixture f;
  f.options.shape.dtype = dtype;
  f.options.codecs = {CodecSpec{{bits}, {bits}}};
  const Shape& s = f.options.shape;
  constexpr int tokens = 21;
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> rows[2];
  std::vector<std::uint16_t> half[2];
  for (int side = 0; side < 2; ++side) {
    for (int i = 0; i < tokens * s.kv_heads * s.head_dim; ++i)
      rows[side].push_back(static_cast<float>(bf16(normal(random))));
    for (int head = 0; head < s.kv_heads; ++head)
      for (int t = 0; t < tokens; ++t)
        for (int d = 0; d < s.head_dim; ++d)
          half[side].push_back(bf16(rows[side][(t * s.kv_heads + head) * s.head_dim + d]).bits);
  }
  CpuStore plain(f.options), copied(f.options);
  for (CpuStore* store : {&plain, &copied}) {
    const int slot = store->open();
    const CpuStore::Bits given = store == &copied ? CpuStore::Bits{half[0].data(), half[1].data()} : CpuStore::Bits{};
    for (int layer = 0; layer < s.layers; ++layer)
      REQUIRE(store->append(layer, slot, rows[0].data(), rows[1].data(), tokens, 0, given) == Fit::ok);
    store->advance(slot, tokens, false);
    store->check_invariants();
  }
  CHECK(copied.save(0) == plain.save(0));
}

TEST_CASE("what does not fit is a value, changes nothing and breaks nothing") {
  StoreFixture f;
  f.options.summary = Summary::min_max;
  const std::int64_t frame = 2 * 4 * 8 * 4 + 128;
  for (int frames = 1; frames < 24; ++frames) {
    CAPTURE(frames);
    f.options.device_limit = frames * frame;
    CpuStore store(f.options);
    const int slot = store.open();
    Fit fit = Fit::ok;
    int n = 0;
    while (fit == Fit::ok && n < 40) {
      fit = f.fill(store, slot, 3);
      store.check_invariants();
      n += 3;
    }
    REQUIRE(fit == Fit::out_of_memory);
    // The layer that did not fit is unchanged. A layer may be a chunk ahead of the other, but its heads are equal.
    for (int layer = 0; layer < 2; ++layer) {
      CHECK(store.length(layer, slot, 0) == store.length(layer, slot, 1));
      for (int head = 0; head < 2; ++head)
        for (const auto& t : test::stored_tokens(store, layer, slot, head))
          CHECK(t.k == f.row(0, layer, slot, head, t.position));
    }
    CHECK(store.ledger().total(Tier::device) - store.ledger().held(Tier::device)[static_cast<int>(Tag::tables)] -
              store.ledger().held(Tier::device)[static_cast<int>(Tag::summaries)] <=
          f.options.device_limit);
    store.close(slot);
    store.check_invariants();
    CHECK(store.ledger().held(Tier::device)[static_cast<int>(Tag::keys)] == 0);
    CHECK(store.ledger().held(Tier::device)[static_cast<int>(Tag::summaries)] == 0);
    // The memory can be used again.
    if (frames >= 4) {
      REQUIRE(store.open() == slot);
      CHECK(f.fill(store, slot, 4) == Fit::ok);
      store.check_invariants();
    }
  }
}

TEST_CASE("recall, offload and encode beyond a limit report it") {
  StoreFixture f;
  const std::int64_t frame = 2 * 4 * 8 * 4 + 128;
  f.options.device_limit = 8 * frame;
  f.options.host_limit = 3 * frame;
  CpuStore store(f.options);
  const int slot = store.open();
  REQUIRE(f.fill(store, slot, 8) == Fit::ok);
  Lists two(2, {0, 1}), one(2, {0});
  {
    StoreFixture coded = f;
    coded.options.codecs = {CodecSpec{}, CodecSpec{}};
    CpuStore full(coded.options);
    REQUIRE(coded.fill(full, full.open(), 8) == Fit::ok);
    CHECK(full.apply(test::encode(two.pages(), 1), {slot}).fit == Fit::out_of_memory);
    full.check_invariants();
  }
  Edits down;
  down.offload(two.pages());
  const Applied done = store.apply(down.all(), {slot});
  CHECK(done.fit == Fit::out_of_memory);
  CHECK(done.changed == 3);
  store.check_invariants();
  Edits away;
  away.drop(Tier::device, one.pages());
  REQUIRE(store.apply(away.all(), {slot}).fit == Fit::ok);
  REQUIRE(f.fill(store, slot, 0) == Fit::ok);
  const int other = store.open();
  StoreFixture short_of = f;
  std::vector<float> kv(2 * 8);
  REQUIRE(store.append(0, other, kv.data(), kv.data(), 1, 0) == Fit::ok);
  Edits up;
  up.recall(one.pages(), Deadline::in_steps(1));
  store.apply(up.all(), {slot});
  CHECK(store.advance(slot, 0, true).fit == Fit::out_of_memory);  // also when the recall is due later
  store.check_invariants();
  store.close(slot);
  store.close(other);
  store.check_invariants();
}

TEST_CASE("a slot that is used again holds nothing of the sequence before") {
  StoreFixture f;
  f.options.token_state = {"score"};
  f.options.summary = Summary::mean;
  CpuStore store(f.options);
  auto* state = static_cast<std::int32_t*>(store.workspace().state("counter", 8, 3));
  const int slot = store.open(), other = store.open();
  state[slot * 2] = 41;
  state[other * 2] = 42;
  f.fill(store, slot, 21);
  f.fill(store, slot, 1, true);
  Lists l(2, {0, 1, 2});
  Edits e;
  e.offload(l.pages());
  e.drop(Tier::device, l.pages());
  store.apply(e.all(), {slot});
  store.close(slot);
  store.check_invariants();
  REQUIRE(store.open() == slot);
  CHECK(store.position(slot) == 0);
  CHECK(store.steps(slot) == 0);
  CHECK(store.length(0, slot, 0) == 0);
  CHECK(store.ledger().total(Tier::host) == 0);
  CHECK(state[slot * 2] == 0);
  CHECK(state[other * 2] == 42);
  for (Tier tier : {Tier::device, Tier::host})
    for (int page = 0; page < 16; ++page) CHECK_FALSE(test::on(store, tier, 0, slot, 0, page));
  f.fill(store, slot, 3);
  for (const auto& t : test::stored_tokens(store, 0, slot, 0)) CHECK(t.state[0] == 0);
  store.check_invariants();
}
