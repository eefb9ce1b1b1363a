// Saving and restoring a sequence.
#include <kvlab/error.hpp>

#include <catch2/catch.hpp>

#include "support/store_fixture.hpp"

using namespace kvlab;
using test::Lists;
using test::StoreFixture;

namespace {

struct Saved {
  StoreFixture f;
  std::unique_ptr<CpuStore> store;
  std::int32_t* state = nullptr;
  int slot = 0;

  Saved() {
    f.options.summary = Summary::min_max;
    f.options.token_state = {"score"};
    f.options.host_codec = CodecSpec{{8}, {0}};
    store = std::make_unique<CpuStore>(f.options);
    state = static_cast<std::int32_t*>(store->workspace().state("counter", 4, 3));
    slot = store->open();
    state[slot] = 17;
    f.fill(*store, slot, 18);
    f.fill(*store, slot, 1, true);
    Lists pages(2, {1, 2}), one(2, {1}), tokens(2, {6, 17});
    Edits e;
    e.offload(pages.pages());
    e.drop(Tier::device, one.pages());
    e.for_layer(1);
    e.evict(tokens.tokens());
    e.evict(one.tokens(), Deadline::in_steps(2));
    store->apply(e.all(), {slot});
  }
};

void check_same(const Store& a, int slot_a, const Store& b, int slot_b) {
  CHECK(a.position(slot_a) == b.position(slot_b));
  CHECK(a.steps(slot_a) == b.steps(slot_b));
  for (int layer = 0; layer < 2; ++layer)
    for (int head = 0; head < 2; ++head) {
      CHECK(test::stored_tokens(a, layer, slot_a, head) == test::stored_tokens(b, layer, slot_b, head));
      for (int page = 0; page * 4 < a.length(layer, slot_a, head); ++page) {
        for (Tier tier : {Tier::device, Tier::host})
          CHECK(test::on(a, tier, layer, slot_a, head, page) == test::on(b, tier, layer, slot_b, head, page));
        CHECK(std::memcmp(a.summaries(layer).at(slot_a, head, page), b.summaries(layer).at(slot_b, head, page), 64) ==
              0);
      }
    }
  a.check_invariants();
  b.check_invariants();
}

}  // namespace

TEST_CASE("a saved sequence comes back whole, into its slot, another one and another store") {
  Saved x;
  const auto bytes = x.store->save(x.slot);
  const Saved reference;
  SECTION("same slot, after it went on") {
    x.f.fill(*x.store, x.slot, 9);
    REQUIRE(x.store->restore(x.slot, bytes) == Fit::ok);
    check_same(*x.store, x.slot, *reference.store, reference.slot);
    CHECK(x.state[x.slot] == 17);
  }
  SECTION("another slot, beside the first") {
    const int other = x.store->open();
    REQUIRE(x.store->restore(other, bytes) == Fit::ok);
    check_same(*x.store, other, *reference.store, reference.slot);
    check_same(*x.store, x.slot, *reference.store, reference.slot);
    CHECK(x.state[other] == 17);
    CHECK(x.store->save(other) == bytes);
    // Pending edits still take effect, each on its own slot's clock.
    CHECK(x.store->length(1, other, 0) == 17);
    x.f.fill(*x.store, other, 1, true);
    x.f.fill(*x.store, other, 1, true);
    CHECK(x.store->length(1, other, 0) == 18);
    CHECK(x.store->length(1, x.slot, 0) == 17);
  }
  SECTION("another slot, by way of host memory") {
    const auto aside = x.store->set_aside(x.slot);
    CHECK(aside->page_bytes(Tier::device) == x.store->page_bytes(Tier::device));
    x.store->close(x.slot);
    const int first = x.store->open(), other = x.store->open();
    x.f.fill(*x.store, first, 9);
    REQUIRE(x.store->bring_back(other, aside) == Fit::ok);
    check_same(*x.store, other, *reference.store, reference.slot);
    CHECK(x.state[other] == 17);
    CHECK(x.store->save(other) == bytes);
  }
  SECTION("another store") {
    Saved y;
    y.store->close(y.slot);
    const int slot = (y.store->open(), y.store->open());
    REQUIRE(y.store->restore(slot, bytes) == Fit::ok);
    check_same(*y.store, slot, *reference.store, reference.slot);
  }
  SECTION("an empty sequence") {
    const int other = x.store->open();
    const auto nothing = x.store->save(other);
    REQUIRE(x.store->restore(x.slot, nothing) == Fit::ok);
    CHECK(x.store->position(x.slot) == 0);
    CHECK(x.store->length(0, x.slot, 0) == 0);
    x.store->check_invariants();
  }
}

TEST_CASE("a cut or changed snapshot is refused and the store goes on") {
  Saved x;
  const auto bytes = x.store->save(x.slot);
  const int other = x.store->open();
  const auto refused = [&](const std::vector<std::byte>& bad) {
    try {
      x.store->restore(other, bad);
      FAIL("a broken snapshot was taken");
    } catch (const Error& e) {
      REQUIRE(e.code() == Errc::data);
    }
    REQUIRE(x.store->length(0, other, 0) == 0);
    x.store->check_invariants();
  };
  for (std::size_t size = 0; size < bytes.size(); size += size < 300 ? 1 : 97)
    refused({bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size)});
  for (std::size_t at = 0; at < bytes.size(); at += at < 600 ? 1 : 53) {
    auto bad = bytes;
    bad[at] ^= std::byte{0x41};
    CAPTURE(at);
    refused(bad);
  }
  auto longer = bytes;
  longer.push_back(std::byte{0});
  refused(longer);
  REQUIRE(x.store->restore(other, bytes) == Fit::ok);
  const Saved reference;
  check_same(*x.store, other, *reference.store, reference.slot);
  check_same(*x.store, x.slot, *reference.store, reference.slot);
}

TEST_CASE("a snapshot of another kind of store is refused") {
  Saved x;
  const auto bytes = x.store->save(x.slot);
  const auto refused = [&](StoreOptions o) {
    CpuStore store(o);
    store.workspace().state("counter", 4, 3);
    CHECK_THROWS_AS(store.restore(store.open(), bytes), Error);
    store.check_invariants();
  };
  StoreOptions o = x.f.options;
  o.host_codec = CodecSpec{{0}, {8}};  // the frames keep their size
  refused(o);
  o.host_codec = CodecSpec{{8, CodeKind::e4m3}, {0}};
  refused(o);
  o = x.f.options;
  o.rope = RopeRegime::cache_relative;
  refused(o);
  o = x.f.options;
  o.shape.page_size = 8;
  refused(o);
  o = x.f.options;
  o.shape.max_tokens = 16;
  refused(o);
  o = x.f.options;
  o.token_state = {};
  refused(o);
}

TEST_CASE("a snapshot that does not fit is a value and leaves an empty slot") {
  Saved x;
  const auto bytes = x.store->save(x.slot);
  StoreOptions o = x.f.options;
  o.device_limit = 5 * 1024;
  CpuStore store(o);
  store.workspace().state("counter", 4, 3);
  const int slot = store.open();
  CHECK(store.restore(slot, bytes) == Fit::out_of_memory);
  CHECK(store.length(0, slot, 0) == 0);
  store.check_invariants();
}
