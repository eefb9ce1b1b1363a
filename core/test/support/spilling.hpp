// Sequences that spill when frames of the device run short, in a store of either device.
#pragma once
#include <kvlab/page_order.hpp>

#include <catch2/catch.hpp>
#include <functional>
#include <vector>

#include "base/stream_memory.hpp"
#include "support/store_fixture.hpp"

namespace kvlab::test {

// Place edits whose lists and orders last.
class LastingPlaces {
 public:
  explicit LastingPlaces(Store& store)
      : store_(store),
        kept_("kept", store.shape(), 4, store.workspace()),
        order_("order", store.shape(), store.workspace()) {}

  // The heads shall keep `page` and the newest one. ranks: the lowest pages leave first; empty = the oldest do.
  Applied place(int slot, int layer, std::int32_t page, const std::vector<float>& ranks = {},
                const Heads& heads = {}) const {
    const std::vector<std::int32_t> rows{slot};
    const std::int32_t one = 1;
    LayerKv kv;
    kv.layer = layer;
    kv.pages = store_.view(layer, rows);
    const PageList list = kept_.of(kv);
    for (int h = 0; h < store_.shape().kv_heads; ++h) {
      copy_memory(&list.index(slot, h, 0), &page, sizeof page, store_.stream());
      copy_memory(&list.count(slot, h), &one, sizeof one, store_.stream());
      copy_memory(&order_.of(kv)(slot, h, 0), ranks.data(), ranks.size() * sizeof(float), store_.stream());
    }
    Placing how{.heads = heads};
    if (!ranks.empty()) how.order = order_.of(kv);
    Edits edits(layer);
    edits.place(list, how);
    const Applied done = store_.apply(edits.all(), rows);
    store_.settle();
    return done;
  }

 private:
  Store& store_;
  KeptPages kept_;
  KeptPageOrder order_;
};

// How a test fills and reads a store of its device. The store is StoreFixture's, under pressure.
struct SpillScene {
  Store& store;
  std::function<void(int slot, int tokens)> fill;
  std::function<std::vector<std::int32_t>(int layer, int slot, int head)> on_device;  // pages
  std::function<std::vector<StoredToken>(int layer, int slot, int head)> tokens;

  std::int64_t spare() const { return store.spare_bytes() / frame_layout(store.options(), {}).bytes; }
};

// A head has 10 pages, of which it keeps two. A spill gives half of the others away, rounded up: 4, then 2, 1 and 1.
// margin: tokens beyond those that fill the free frames, before the third spill.
inline void check_order_of_leaving(const SpillScene& x, bool ordered, int margin) {
  using Pages = std::vector<std::int32_t>;
  const LastingPlaces places(x.store);
  const int b = x.store.open(), a = x.store.open();
  x.fill(a, 40);
  const auto before = x.tokens(1, a, 1);
  const auto keep = [&](int page) {
    const std::vector<float> ranks{3, 9, 1, 7, 5, 0, 8, 2, 6, 4};
    for (int layer = 0; layer < 2; ++layer)
      REQUIRE(places.place(a, layer, page, ordered ? ranks : std::vector<float>()).fit == Fit::ok);
  };
  const auto device = [&] { return x.on_device(1, a, 1); };
  keep(1);
  CHECK(x.store.fired() == 0);
  CHECK(x.spare() == 4 * 8);
  x.fill(b, 16);
  CHECK(device() == (ordered ? Pages{1, 3, 4, 6, 8, 9} : Pages{1, 5, 6, 7, 8, 9}));
  CHECK(x.spare() == 4 * 4);
  x.fill(b, 16);
  CHECK(device() == (ordered ? Pages{1, 3, 6, 9} : Pages{1, 7, 8, 9}));
  CHECK(x.spare() == 4 * 2);
  const std::int64_t fired = x.store.fired();
  keep(5);  // page 5 comes, and one of the others leaves
  CHECK(x.store.fired() == fired + 2);
  CHECK(device() == (ordered ? Pages{1, 5, 6, 9} : Pages{5, 7, 8, 9}));
  x.fill(b, 4 + margin);
  CHECK(device() == (ordered ? Pages{1, 5, 9} : Pages{5, 8, 9}));
  x.fill(b, 4);
  CHECK(device() == Pages{5, 9});
  CHECK(x.spare() == 0);
  CHECK(x.store.spill_rounds() == 4);
  keep(2);
  CHECK(device() == Pages{2, 9});
  CHECK(x.tokens(1, a, 1) == before);
  x.store.check_invariants();
}

// The heads of check_order_of_leaving. Between the spills the sequence is saved and comes back: to its slot and to
// another one, by bytes and by way of host memory. fresh: a store like it, in which nobody has placed pages.
inline void check_spills_after_restore(const SpillScene& x, const SpillScene& fresh, int margin) {
  using Pages = std::vector<std::int32_t>;
  const LastingPlaces places(x.store), unseen(fresh.store);
  const int b = x.store.open();
  int a = x.store.open();
  x.fill(a, 40);
  const auto before = x.tokens(1, a, 1);
  const std::vector<float> ranks{3, 9, 1, 7, 5, 0, 8, 2, 6, 4};
  const auto keep = [&](int page) {
    for (int layer = 0; layer < 2; ++layer) REQUIRE(places.place(a, layer, page, ranks).fit == Fit::ok);
  };
  const auto come_back = [&] {
    const std::int64_t spare = x.spare();
    REQUIRE(x.store.restore(a, x.store.save(a)) == Fit::ok);
    CHECK(x.spare() == spare);
    const Store::Aside aside = x.store.set_aside(a);
    const int other = a == 1 ? 2 : 1;
    x.store.close(a);
    REQUIRE((x.store.open(), x.store.open()) == 2);
    x.store.close(3 - other);
    a = other;
    REQUIRE(x.store.bring_back(a, aside) == Fit::ok);
    CHECK(x.spare() == spare);
    x.store.check_invariants();
  };
  keep(1);
  const auto saved = x.store.save(a);
  come_back();
  CHECK(x.spare() == 4 * 8);
  CHECK(x.store.page_bytes(Tier::host) == 0);
  x.fill(b, 16);
  CHECK(x.on_device(1, a, 1) == Pages{1, 3, 4, 6, 8, 9});
  come_back();
  CHECK(x.on_device(1, a, 1) == Pages{1, 3, 4, 6, 8, 9});
  x.fill(b, 16);
  CHECK(x.on_device(1, a, 1) == Pages{1, 3, 6, 9});
  come_back();
  keep(5);  // the head has room for four pages still
  CHECK(x.on_device(1, a, 1) == Pages{1, 5, 6, 9});
  x.fill(b, 4 + margin);
  CHECK(x.on_device(1, a, 1) == Pages{1, 5, 9});
  CHECK(x.spare() == 4);
  CHECK(x.store.spill_rounds() == 3);
  x.fill(b, 4);
  CHECK(x.on_device(1, a, 1) == Pages{5, 9});
  CHECK(x.store.spill_rounds() == 4);
  come_back();
  CHECK(x.spare() == 0);
  keep(2);
  CHECK(x.on_device(1, a, 1) == Pages{2, 9});
  CHECK(x.tokens(1, a, 1) == before);

  // A cache that comes back takes the frames of another that has not spilled.
  x.store.close(a), x.store.close(b);
  a = x.store.open();
  REQUIRE(x.store.restore(a, saved) == Fit::ok);
  const int c = x.store.open();
  REQUIRE(x.store.restore(c, saved) == Fit::ok);
  CHECK(x.on_device(1, a, 1).size() == (margin > 0 ? 3 : 2));
  CHECK(x.on_device(1, c, 1).size() == 10);
  CHECK(x.tokens(1, a, 1) == before);
  CHECK(x.tokens(1, c, 1) == before);
  x.store.check_invariants();

  const int only = fresh.store.open();
  REQUIRE(fresh.store.restore(only, saved) == Fit::ok);
  CHECK(fresh.spare() == 0);
  for (int layer = 0; layer < 2; ++layer) REQUIRE(unseen.place(only, layer, 1, ranks).fit == Fit::ok);
  CHECK(fresh.on_device(1, only, 1) == Pages{1, 9});
  fresh.store.check_invariants();
}

// Head 0 of slot `a` has 60 pages, head 1 has 10, in one layer. The edit is for both or for head 1 alone, and keeps two
// pages of each. So 66 or 8 pages can leave, each time half of them. other_heads: HeadClass of head 0.
inline void check_ragged_spill(const SpillScene& x, int a, int b, bool both, const std::uint8_t* other_heads) {
  const auto before = x.tokens(0, a, 1);
  const LastingPlaces places(x.store);
  REQUIRE(places.place(a, 0, 1, {}, both ? Heads{} : Heads{}.except(other_heads)).fit == Fit::ok);
  std::int64_t spare = both ? 66 : 8;
  CHECK(x.spare() == spare);
  while (spare > 0) {
    CAPTURE(spare);
    for (const std::int64_t rounds = x.store.spill_rounds(); x.store.spill_rounds() == rounds;) x.fill(b, 4);
    const std::int64_t left = x.spare();
    CHECK(left <= spare / 2);
    spare = std::min(left, spare - 1);
  }
  CHECK(x.store.spill_rounds() <= (both ? 7 : 4));
  CHECK(x.on_device(0, a, 1) == std::vector<std::int32_t>{1, 9});
  CHECK(x.on_device(0, a, 0).size() == (both ? 2 : 60));
  CHECK(x.tokens(0, a, 1) == before);
  x.store.check_invariants();
}

}  // namespace kvlab::test
