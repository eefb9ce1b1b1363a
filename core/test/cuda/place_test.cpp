// Which frames a place edit takes on the GPU, also where none is free, and when edits of tokens to come take effect.
#include <catch2/catch.hpp>
#include <memory>
#include <vector>

#include "support/cuda_rows.hpp"
#include "support/spilling.hpp"

using namespace kvlab;
using cases::OnDevice;
using test::Lists;
using test::StoreFixture;

namespace {

using Pages = std::vector<std::int32_t>;

// One layer of two KV heads in 24 frames of the device. Slot 0 has 46 tokens, 12 pages of each head. Its set becomes
// {2, 5} and the newest page, 11. With `full` another sequence takes all frames that are free then.
struct Scene : StoreFixture {
  OnDevice memory;
  std::unique_ptr<CudaStore> store;

  explicit Scene(bool full, const StoreOptions& like = {}) {
    options.token_state = like.token_state;
    options.host_codec = like.host_codec;
    options.pauses = like.pauses;
    options.shape.layers = 1;
    options.host_pages = true;
    const std::int64_t frame = frame_layout(options, {}).bytes;
    options.device_limit = 24 * frame;
    store = std::make_unique<CudaStore>(options, memory.stream());
    REQUIRE(store->open() == 0);
    test::append_rows(*store, *this, memory, 0, 46);
    place({2, 5}, true);
    REQUIRE(device() == Pages{2, 5, 11});
    if (full) {
      REQUIRE(store->open() == 1);
      test::append_rows(*store, *this, memory, 1, 36);
      REQUIRE(store->page_bytes(Tier::device) == options.device_limit);
    }
  }
  void place(const Pages& pages, bool reuse, Deadline when = {Deadline::this_attention}) {
    Edits e(0);
    e.place(memory.put(Lists(2, pages).pages()), {.reuse = reuse, .when = when});
    REQUIRE(store->apply(e.all(), {0}).fit == Fit::ok);
    store->settle();
    store->check_invariants();
  }
  std::vector<PageEntry> entries() { return test::entries_of(*store, memory, 0, 0); }
  std::int32_t frame(int head, int page) {
    return entries()[static_cast<std::size_t>(head * store->shape().max_pages() + page)].frame;
  }
  Pages device() {
    Pages out;
    for (int page = 0; page < store->shape().max_pages(); ++page)
      if (frame(1, page) != null_frame) out.push_back(page);
    return out;
  }
  std::vector<test::StoredToken> tokens() { return test::stored_tokens(*store->copy_of(0), 0, 0, 1); }
};

}  // namespace

// FlexiCache's card, hand test 3: page 9 comes in the frame of page 2, and 5 stays where it is.
TEST_CASE("cuda store: a page that comes takes the frame of one that leaves, also with no free frame left") {
  for (const bool full : {false, true})
    for (const Deadline::Kind kind : {Deadline::this_attention, Deadline::next_attention}) {
      CAPTURE(full, static_cast<int>(kind));
      Scene s(full);
      const auto before = s.tokens();
      const std::int32_t of_2[] = {s.frame(0, 2), s.frame(1, 2)}, of_5 = s.frame(1, 5);
      const std::int64_t written = s.store->ledger().moved_total(Tier::host),
                         read = s.store->ledger().moved_total(Tier::device);
      s.place({5, 9}, true, {kind});
      CHECK(s.device() == Pages{5, 9, 11});
      for (const int head : {0, 1}) CHECK(s.frame(head, 9) == of_2[head]);
      CHECK(s.frame(1, 5) == of_5);
      CHECK(s.store->ledger().moved_total(Tier::host) == written);
      CHECK(s.store->ledger().moved_total(Tier::device) > read);
      CHECK(s.tokens() == before);
      s.place({0, 10}, true, {kind});  // two come, two leave
      CHECK(s.device() == Pages{0, 10, 11});
      CHECK(s.tokens() == before);
      if (full) CHECK(s.store->page_bytes(Tier::device) == s.options.device_limit);
    }
}

TEST_CASE(
    "cuda store: without reuse a page that comes takes a frame of the pool, and the other's where there is none") {
  for (const bool full : {false, true}) {
    CAPTURE(full);
    Scene s(full);
    const auto before = s.tokens();
    const std::int32_t of_2 = s.frame(1, 2);
    s.place({5, 9}, false);
    CHECK(s.device() == Pages{5, 9, 11});
    CHECK((s.frame(1, 9) == of_2) == full);
    CHECK(s.tokens() == before);
    s.store->check_invariants();
  }
}

// Layers of two KV heads. Free are the frames that the step may need, one of each head for its token and one for its
// set. Three pages of a head come and three leave. Each appended token opens a page.
TEST_CASE("cuda store: without reuse a place edit leaves the frames that appends of later layers need") {
  for (const bool reserved : {true, false})
    for (const Deadline::Kind kind : {Deadline::this_attention, Deadline::next_attention}) {
      CAPTURE(reserved, static_cast<int>(kind));
      StoreFixture f;
      f.options.host_pages = true;
      f.options.device_limit = 48 * frame_layout(f.options, {}).bytes;
      OnDevice memory;
      CudaStore store(f.options, memory.stream());
      REQUIRE(store.open() == 0);
      REQUIRE(store.open() == 1);
      const auto place = [&](int layer, const Pages& pages, const Placing& how) {
        Edits e(layer);
        e.place(memory.put(Lists(2, pages).pages()), how);
        REQUIRE(store.apply(e.all(), {0}).fit == Fit::ok);
      };
      test::append_rows(store, f, memory, 0, 48);
      for (const int layer : {0, 1}) place(layer, {2, 5}, {.when = {Deadline::this_attention}});
      test::append_rows(store, f, memory, 1, 28);
      REQUIRE(store.page_bytes(Tier::device) == 40 * frame_layout(f.options, {}).bytes);
      if (reserved) REQUIRE(store.reserve_step({0}, {}));
      store.reserved(reserved);
      for (const int layer : {0, 1}) {
        test::append_step(store, f, memory, layer, 0);
        place(layer, {7, 8, 9}, {.reuse = false, .when = {kind}});
      }
      store.reserved(false);
      store.settle();
      store.advance(0, 1, true);
      store.check_invariants();
      for (const int layer : {0, 1})
        for (const int head : {0, 1}) {
          CHECK(store.length(layer, 0, head) == 49);
          const auto entries = test::entries_of(store, memory, layer, 0);
          Pages there;
          for (int page = 0; page < store.shape().max_pages(); ++page)
            if (entries[static_cast<std::size_t>(head * store.shape().max_pages() + page)].frame != null_frame)
              there.push_back(page);
          CHECK(there == Pages{7, 8, 9, 12});
        }
    }
}

// Page 11 is full now and was never copied. The set to come has it no more, and other pages come. With `full` its
// frames are all that they can have.
TEST_CASE("cuda store: a page without a copy gives its frame to one that comes, once it is written down") {
  StoreOptions plain, with_state, coded;
  with_state.token_state = {"x"};
  coded.host_codec.k.bits = coded.host_codec.v.bits = 8;
  for (const StoreOptions& like : {plain, with_state, coded})
    for (const Pages& set : {Pages{2, 5, 9}, Pages{0, 1, 9}})
      for (const bool reuse : {true, false})
        for (const Deadline::Kind kind : {Deadline::this_attention, Deadline::next_attention}) {
          CAPTURE(like.token_state.size(), like.host_codec.k.bits, set, reuse, static_cast<int>(kind));
          std::vector<test::StoredToken> kept[2];
          std::vector<std::int64_t> moved[2];
          for (const bool full : {false, true}) {
            Scene s(false, like);
            REQUIRE(s.store->open() == 1);
            if (full) test::append_rows(*s.store, s, s.memory, 1, 32);
            test::append_rows(*s.store, s, s.memory, 0, 3);
            REQUIRE((s.store->page_bytes(Tier::device) == s.options.device_limit) == full);
            const std::int32_t of_11 = s.frame(1, 11);
            const Ledger& ledger = s.store->ledger();
            s.place(set, reuse, {kind});
            Pages wanted = set;
            wanted.push_back(12);
            CHECK(s.device() == wanted);
            bool takes = false;
            for (const int page : set) takes |= s.frame(1, page) == of_11;
            CHECK((!full || takes));
            kept[full] = s.tokens();
            moved[full] = {ledger.moved_total(Tier::host), ledger.moved_total(Tier::device), s.store->fired(),
                           s.store->page_bytes(Tier::device), s.store->page_bytes(Tier::host)};
            if (full) moved[full][3] -= 16 * frame_layout(s.options, {}).bytes;
            for (const int page : {3, 11}) s.place({page}, reuse, {kind});
            CHECK(s.device() == Pages{11, 12});
            s.store->check_invariants();
          }
          CHECK(kept[0] == kept[1]);
          CHECK(moved[0] == moved[1]);
        }
}

// Of large pages a block has few warps, and a warp two pages under way.
TEST_CASE("cuda store: pages of codes come from the host as they lie there, also many and large ones") {
  struct Kind {
    int page_size, head_dim, pages;
  };
  for (const auto& [page_size, head_dim, pages] : {Kind{16, 16, 300}, {128, 128, 40}}) {
    CAPTURE(page_size, head_dim);
    StoreFixture f;
    f.options.host_pages = true;
    f.options.host_codec.k.bits = f.options.host_codec.v.bits = 8;
    f.options.shape.layers = 1, f.options.shape.head_dim = head_dim, f.options.shape.page_size = page_size;
    const int tokens = f.options.shape.max_tokens = pages * page_size;
    OnDevice memory;
    CudaStore store(f.options, memory.stream());
    const int slot = store.open();
    test::append_rows(store, f, memory, slot, tokens);
    Pages all;
    for (int i = 0; i < pages; ++i) all.push_back(i);
    const auto held = [&](const Pages& set) {
      Edits e(0);
      e.place(memory.put(Lists(2, set).pages()), {.when = {Deadline::this_attention}});
      REQUIRE(store.apply(e.all(), {slot}).fit == Fit::ok);
      store.settle();
      store.check_invariants();
      return test::stored_tokens(*store.copy_of(slot), 0, 0, 1);
    };
    const auto below = held({});
    CHECK(store.page_bytes(Tier::device) == 2 * frame_layout(f.options, {}).bytes);
    CHECK(held(all) == below);
    CHECK(store.page_bytes(Tier::device) == 2 * pages * frame_layout(f.options, {}).bytes);
  }
}

namespace {

test::SpillScene scene_of(CudaStore& store, const StoreFixture& f, OnDevice& memory) {
  return {store, [&](int slot, int tokens) { test::append_rows(store, f, memory, slot, tokens); },
          [&](int layer, int slot, int head) {
            const auto all = test::entries_of(store, memory, layer, slot);
            const auto most = static_cast<std::size_t>(store.shape().max_pages());
            Pages out;
            for (std::size_t page = 0; page < most; ++page)
              if (all[static_cast<std::size_t>(head) * most + page].frame != null_frame)
                out.push_back(static_cast<std::int32_t>(page));
            return out;
          },
          [&](int layer, int slot, int head) { return test::stored_tokens(*store.copy_of(slot), layer, 0, head); }};
}

}  // namespace

TEST_CASE("cuda store: when frames run short the pages leave first that the order ranks lowest, a part at a time") {
  for (const bool ordered : {true, false}) {
    CAPTURE(ordered);
    StoreFixture f;
    f.options.host_pages = true, f.options.spill = Spill::pressure;
    f.options.device_limit = 52 * frame_layout(f.options, {}).bytes;  // a place edit reserves a frame for each head
    OnDevice memory;
    CudaStore store(f.options, memory.stream());
    check_order_of_leaving(scene_of(store, f, memory), ordered, 4);
  }
}

TEST_CASE("cuda store: a sequence that comes back spills as it would have, and only if it had or frames run short") {
  StoreFixture f;
  f.options.host_pages = true, f.options.spill = Spill::pressure;
  f.options.device_limit = 52 * frame_layout(f.options, {}).bytes;  // a place edit reserves a frame for each head
  OnDevice memory;
  CudaStore store(f.options, memory.stream()), fresh(f.options, memory.stream());
  check_spills_after_restore(scene_of(store, f, memory), scene_of(fresh, f, memory), 4);
}

TEST_CASE("cuda store: each part of a spill gives frames back where heads of a layer differ much in length") {
  for (const bool both : {true, false}) {
    CAPTURE(both);
    StoreFixture f;
    f.options.host_pages = true, f.options.spill = Spill::pressure;
    f.options.shape.layers = 1, f.options.shape.max_tokens = 256;
    f.options.device_limit = 122 * frame_layout(f.options, {}).bytes;  // a place edit reserves a frame for each head
    OnDevice memory;
    CudaStore store(f.options, memory.stream());
    const int a = store.open(), b = store.open();
    test::append_rows(store, f, memory, a, 240);
    test::PerHead gone(2);
    for (int t = 40; t < 240; ++t) gone[1].push_back(t);
    const Lists leaves(gone);
    Edits shorter;
    shorter.evict(memory.put(leaves.tokens()));
    REQUIRE(store.apply(shorter.all(), {a}).fit == Fit::ok);
    test::append_rows(store, f, memory, b, 100);
    const std::uint8_t long_one[] = {1, 0};
    check_ragged_spill(scene_of(store, f, memory), a, b, both, memory.put(long_one, 2));
  }
}

TEST_CASE("cuda store: pages of a head that are written down together lie side by side on the host") {
  Scene s(false);
  const auto below = test::entries_of(*s.store, s.memory, 0, 0, Tier::host);
  const auto step = static_cast<std::int32_t>(frame_layout(s.options, {}).bytes / granule_bytes);
  for (int head = 0; head < 2; ++head)
    for (int page = 1; page < 11; ++page) {
      const auto at = static_cast<std::size_t>(head * s.store->shape().max_pages() + page);
      CHECK(below[at].frame == below[at - 1].frame + step);
    }
}

// As on the CPU (core/test/store/edits_test.cpp).
TEST_CASE("cuda store: an edit of n steps from now takes effect exactly then, from lists of its own, per row") {
  StoreFixture f;
  OnDevice memory;
  CudaStore store(f.options, memory.stream());
  const int a = store.open(), b = store.open();
  const auto fill = [&](int slot, int count, bool decode = false) {
    return test::append_rows(store, f, memory, slot, count, decode);
  };
  fill(a, 6);
  fill(b, 6);
  fill(b, 1, true);  // b's clock is ahead: rows wait on their own
  std::vector<std::int32_t> index{2, 3, 4, 5}, count{1, 1, 1, 1};
  TokenList list;
  list.index = View<std::int32_t, 3>::dense(memory.put(index), {2, 2, 1});
  list.count = View<std::int32_t, 2>::dense(memory.put(count), {2, 2});
  Edits e;
  e.evict(list, Deadline::in_steps(2));
  REQUIRE(store.apply(e.all(), {a, b}).fit == Fit::ok);
  memory.synchronize();
  zero_memory(list.index.data, 4 * sizeof(std::int32_t), memory.stream());  // as a later callback may overwrite it
  zero_memory(list.count.data, 4 * sizeof(std::int32_t), memory.stream());
  CHECK(store.length(0, a, 0) == 6);
  fill(a, 1, true);
  CHECK(store.length(0, a, 0) == 7);
  fill(a, 3);  // a prompt chunk is no decode step
  CHECK(store.length(0, a, 0) == 10);
  const std::int64_t fired = store.fired();
  fill(a, 1, true);
  CHECK(store.length(0, a, 0) == 10);
  CHECK(store.fired() == fired + 1);
  CHECK(store.positions(0, a, 0) == std::vector<std::int32_t>{0, 1, 3, 4, 5, 6, 7, 8, 9, 10});
  CHECK(store.positions(0, a, 1)[3] == 4);
  CHECK(store.length(1, a, 0) == 11);
  CHECK(store.length(0, b, 0) == 7);
  fill(b, 1, true);
  CHECK(store.length(0, b, 0) == 8);
  fill(b, 1, true);
  CHECK(store.length(0, b, 0) == 8);
  CHECK(store.positions(0, b, 0)[4] == 5);  // token 4 left
  fill(b, 1, true);
  CHECK(store.length(0, b, 0) == 9);  // the edit acts once
  store.check_invariants();
}

// As on the CPU (core/test/store/place_test.cpp).
TEST_CASE("cuda store: a place edit comes with its deadline, in no step before and in none after") {
  StoreOptions pauses;
  pauses.pauses = true;
  for (const int steps : {0, 1, 3}) {  // 0: the next one by name
    CAPTURE(steps);
    Scene f(false, pauses);
    const auto step = [&] { test::append_rows(*f.store, f, f.memory, 0, 1, true); };
    f.place({1, 4}, true, steps == 0 ? Deadline{Deadline::next_step} : Deadline::in_steps(steps));
    for (int i = 1; i < steps; ++i) {
      step();
      CHECK(f.device() == Pages{2, 5, 11});
    }
    CHECK(f.device() == Pages{2, 5, 11});
    step();
    f.store->settle();
    const int newest = steps < 3 ? 11 : 12;  // token 48 begins a page
    CHECK(f.device() == Pages{1, 4, newest});
    for (int i = 0; i < 4; ++i) step();
    CHECK(f.device() == Pages{1, 4, newest, newest + 1});  // once only
    f.store->check_invariants();
  }
  Scene f(false, pauses);
  f.place({1}, true, {Deadline::sequence});
  f.place({4}, true, {Deadline::next_step});  // given later, and it runs first
  CHECK(f.device() == Pages{2, 5, 11});
  test::append_rows(*f.store, f, f.memory, 0, 1, true);
  f.store->settle();
  CHECK(f.device() == Pages{1, 11});
  f.store->check_invariants();
}
