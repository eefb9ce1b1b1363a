// Edits::place says where pages shall be; the store finds what is missing.
#include <kvlab/error.hpp>
#include <kvlab/key_factors.hpp>
#include <kvlab/policy.hpp>

#include <catch2/catch.hpp>
#include <limits>
#include <optional>

#include "support/spilling.hpp"

using namespace kvlab;
using test::Lists;
using test::on;
using test::PerHead;
using test::StoreFixture;

namespace {

using Pages = std::vector<std::int32_t>;

struct Placed : StoreFixture {
  Placed() { options.host_pages = true; }
};

Applied place(Store& store, int slot, const PageList& pages, const Placing& how) {
  Edits edits;
  edits.place(pages, how);
  return store.apply(edits.all(), {slot});
}

Pages pages_on(const Store& store, Tier tier, int slot, int head, int layer = 0) {
  Pages out;
  const int p = store.shape().page_size;
  for (int page = 0; page * p < store.length(layer, slot, head); ++page)
    if (on(store, tier, layer, slot, head, page)) out.push_back(page);
  return out;
}

}  // namespace

// FlexiCache's card, hand test 3: the set {2, 5} becomes {5, 9}; page 9 comes, page 2 leaves and 5 stays where it is.
TEST_CASE("place moves what differs from the set before, and nothing else") {
  Placed f;
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 46);  // 11 full pages and one with 2 tokens
  const auto before = test::stored_tokens(store, 0, slot, 0);
  CHECK(place(store, slot, Lists(2, {2, 5}).pages(), {}).changed == 2 * 9);  // pages that left
  CHECK(pages_on(store, Tier::device, slot, 0) == Pages{2, 5, 11});
  CHECK(pages_on(store, Tier::host, slot, 1) == Pages{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
  const std::int32_t frame = store.view(0, {slot}).entry(0, 0, 5).frame;
  const std::int64_t written = store.ledger().moved_total(Tier::host), read = store.ledger().moved_total(Tier::device);
  CHECK(place(store, slot, Lists(2, {5, 9}).pages(), {}).changed == 2 * 2);
  CHECK(pages_on(store, Tier::device, slot, 0) == Pages{5, 9, 11});
  CHECK(store.view(0, {slot}).entry(0, 0, 5).frame == frame);
  CHECK(store.ledger().moved_total(Tier::host) == written);  // every page is written down once
  CHECK(store.ledger().moved_total(Tier::device) - read == 2 * store.page_bytes(Tier::host) / (2 * 11));
  CHECK(place(store, slot, Lists(2, {5, 9}).pages(), {}).changed == 0);
  CHECK(test::stored_tokens(store, 0, slot, 0) == before);
  CHECK(pages_on(store, Tier::device, slot, 0, 1).size() == 12);  // the other layer stays
  store.check_invariants();
}

// The same with no free frame left: another sequence takes all others. Page 9 then comes in the frame of page 2, also
// without `reuse`.
TEST_CASE("place brings pages in the frames of those that leave where no other is free") {
  const bool reuse = GENERATE(true, false);
  CAPTURE(reuse);
  Placed f;
  f.options.shape.layers = 1;
  const std::int64_t frame = frame_layout(f.options, {}).bytes;
  f.options.device_limit = 24 * frame;
  CpuStore store(f.options);
  const int slot = store.open(), other = store.open();
  REQUIRE(f.fill(store, slot, 46) == Fit::ok);
  const auto before = test::stored_tokens(store, 0, slot, 0);
  REQUIRE(place(store, slot, Lists(2, {2, 5}).pages(), {}).fit == Fit::ok);
  REQUIRE(f.fill(store, other, 36) == Fit::ok);
  REQUIRE(store.page_bytes(Tier::device) == f.options.device_limit);
  const std::vector<std::int32_t> rows{slot};
  const auto frame_of = [&](int head, int page) { return store.view(0, rows).entry(0, head, page).frame; };
  const std::int32_t of_2[] = {frame_of(0, 2), frame_of(1, 2)}, of_5 = frame_of(1, 5);
  REQUIRE(place(store, slot, Lists(2, {5, 9}).pages(), {.reuse = reuse}).fit == Fit::ok);
  CHECK(pages_on(store, Tier::device, slot, 1) == Pages{5, 9, 11});
  for (const int head : {0, 1}) CHECK(frame_of(head, 9) == of_2[head]);
  CHECK(frame_of(1, 5) == of_5);
  REQUIRE(place(store, slot, Lists(2, {0, 10}).pages(), {.reuse = reuse}).fit == Fit::ok);  // two come, two leave
  CHECK(pages_on(store, Tier::device, slot, 0) == Pages{0, 10, 11});
  CHECK(test::stored_tokens(store, 0, slot, 0) == before);
  store.check_invariants();
}

// Page 11 is full by now, has no copy, and is to leave.
TEST_CASE("place brings a page in the frame of one that is written down only then") {
  Placed f;
  f.options.shape.layers = 1;
  f.options.device_limit = 24 * frame_layout(f.options, {}).bytes;
  CpuStore store(f.options);
  const int slot = store.open(), other = store.open();
  REQUIRE(f.fill(store, slot, 46) == Fit::ok);
  REQUIRE(place(store, slot, Lists(2, {2, 5}).pages(), {}).fit == Fit::ok);
  REQUIRE(f.fill(store, other, 32) == Fit::ok);
  REQUIRE(f.fill(store, slot, 3) == Fit::ok);
  REQUIRE(store.page_bytes(Tier::device) == f.options.device_limit);
  REQUIRE_FALSE(on(store, Tier::host, 0, slot, 1, 11));
  const auto before = test::stored_tokens(store, 0, slot, 1);
  REQUIRE(place(store, slot, Lists(2, {2, 5, 9}).pages(), {}).fit == Fit::ok);
  CHECK(pages_on(store, Tier::device, slot, 1) == Pages{2, 5, 9, 12});
  CHECK(on(store, Tier::host, 0, slot, 1, 11));
  CHECK(test::stored_tokens(store, 0, slot, 1) == before);
  store.check_invariants();
}

TEST_CASE("a place edit of a sequence's deadline runs when its step has ended, behind the step's other edits") {
  for (const bool decode : {false, true}) {
    CAPTURE(decode);
    Placed f;
    f.options.pauses = true;
    CpuStore store(f.options);
    const int slot = store.open();
    f.fill(store, slot, 20);
    const auto all_there = pages_on(store, Tier::device, slot, 0);
    place(store, slot, Lists(2, {1}).pages(), {.when = {Deadline::sequence}});
    place(store, slot, Lists(2, {2}).pages(), {.when = {Deadline::next_step}});  // given later, and it runs first
    CHECK(pages_on(store, Tier::device, slot, 0) == all_there);                  // none of them came early
    CHECK(pages_on(store, Tier::host, slot, 0).empty());
    f.fill(store, slot, 1, decode);
    CHECK(pages_on(store, Tier::device, slot, 0) == Pages{1, 5});
    CHECK(pages_on(store, Tier::host, slot, 1) == Pages{0, 1, 2, 3, 4});
    f.fill(store, slot, 4, decode);
    CHECK(pages_on(store, Tier::device, slot, 0) == Pages{1, 5, 6});  // once only
    store.check_invariants();
  }
}

TEST_CASE("place keeps pins and the newest page, and as many others as there is room for") {
  Placed f;
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 46);
  place(store, slot, Lists(2, {}).pages(), {.pins = {.first = 5, .last = 4}});
  CHECK(pages_on(store, Tier::device, slot, 0) == Pages{0, 1, 10, 11});
  place(store, slot, Lists(2, {4, 6}).pages(), {.room = 5});
  CHECK(pages_on(store, Tier::device, slot, 0) == Pages{1, 4, 6, 10, 11});  // page 0 is the oldest
  place(store, slot, Lists(2, {}).pages(), {.room = 100});
  CHECK(pages_on(store, Tier::device, slot, 0) == Pages{1, 4, 6, 10, 11});
  store.check_invariants();
}

// Pages 0 to 4 have factors, and page 3 of head 1 has a key of its own.
TEST_CASE("a place edit that names factors brings pages without their keys, and makes them") {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    CAPTURE(name_of(dtype));
    Placed f;
    f.options.rebuilds_keys = true;
    f.options.shape.dtype = dtype;
    CpuStore store(f.options);
    const int slot = (store.open(), store.open());
    f.fill(store, slot, 46);
    constexpr int rank = 3, places = 21;
    const KeptKeyFactors kept("factors", f.options.shape, rank, store.workspace());
    LayerKv at;
    const KeyFactors& factors = kept.of(at);
    REQUIRE(factors);
    const std::int64_t element = static_cast<std::int64_t>(size_of(dtype));
    const auto fill = [&](std::byte* to, std::int64_t numbers) {  // small numbers that both dtypes have
      for (std::int64_t i = 0; i < numbers; ++i) {
        const float x = static_cast<float>((i * 37 + 11) % 23 - 11) / 8;
        const std::uint16_t bits = bf16(x).bits;
        std::memcpy(to + i * element, dtype == DType::f32 ? static_cast<const void*>(&x) : &bits,
                    static_cast<std::size_t>(element));
      }
    };
    fill(factors.tokens + slot * factors.slot_bytes, factors.row * places);
    fill(factors.basis + slot * factors.slot_bytes, std::int64_t{rank} * 2 * 8);
    factors.count_of(slot) = places;
    factors.whole_of(slot, 1)[3] = 1;
    std::vector<std::vector<test::StoredToken>> before;
    for (int head = 0; head < 2; ++head) before.push_back(test::stored_tokens(store, 0, slot, head));
    const std::vector<std::int32_t> slots{slot};
    std::vector<float> made(2 * 46 * 8);
    const auto rows = View<float, 4>::dense(made.data(), {1, 2, 46, 8});
    ops::rebuild_rows(store.view(0, slots), factors, rows, Stream::cpu());
    place(store, slot, Lists(2, {}).pages(), {});
    place(store, slot, Lists(2, {1, 3, 5, 7}).pages(), {.when = {Deadline::this_attention}, .keys = &factors});
    const std::int64_t page = 4 * 8 * element;
    CHECK(store.ledger().moved(Tier::device)[static_cast<std::size_t>(Tag::values)] == 8 * page);
    CHECK(store.ledger().moved(Tier::device)[static_cast<std::size_t>(Tag::keys)] == 5 * page);
    for (int head = 0; head < 2; ++head) {
      auto wanted = before[static_cast<std::size_t>(head)];
      std::size_t changed = 0;
      for (const int x : {1, 3})
        for (int t = x * 4; t < x * 4 + 4 && !(head == 1 && x == 3); ++t) {
          std::vector<float>& k = wanted[static_cast<std::size_t>(t)].k;
          const std::vector<float> own = k;
          for (std::size_t d = 0; d < 8; ++d) {
            const float y = rows(0, head, t, static_cast<std::int64_t>(d));
            k[d] = dtype == DType::f32 ? y : static_cast<float>(bf16(y));
          }
          changed += k != own;
        }
      CHECK(changed == (head == 0 ? 8 : 4));
      CHECK(test::stored_tokens(store, 0, slot, head) == wanted);
    }
    store.check_invariants();
    Edits edits;
    const Lists first(2, {0});
    edits.place(first.pages(), {.when = Deadline::in_steps(2), .keys = &factors});
    CHECK_THROWS_WITH(store.apply(edits.all(), slots), Catch::Contains("got factors of keys in an edit to come"));
    KeyFactors other = factors;
    other.pages = 3;
    CHECK_THROWS_WITH(place(store, slot, Lists(2, {0}).pages(), {.keys = &other}),
                      Catch::Contains("got factors of keys of another cache"));
  }
  Placed f;
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 8);
  const KeyFactors none;
  CHECK_THROWS_WITH(place(store, slot, Lists(2, {0}).pages(), {.keys = &none}),
                    Catch::Contains("got factors of keys without Needs::rebuilds_keys"));
  f.options.rebuilds_keys = true, f.options.host_pages = false;
  CHECK_THROWS_WITH(CpuStore(f.options), Catch::Contains("got Needs::rebuilds_keys with no pages on the host"));
}

// ArkVale's card: a budget of 6 pages, one of sinks and two of the window. The best pages are 1 and 6. They take the
// frames of the pages with the lowest scores, 3 and 5.
TEST_CASE("place lets the pages leave that the order ranks lowest") {
  Placed f;
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 38);
  const Pins pins{.first = 4, .last = 5};
  place(store, slot, Lists(2, {3, 4, 5}).pages(), {.pins = pins});
  REQUIRE(pages_on(store, Tier::device, slot, 0) == Pages{0, 3, 4, 5, 8, 9});
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> scores = {nan, 9, 1, 2, 7, 3,   8, 0, nan, nan,   // KV head 0
                               nan, 9, 1, 2, 1, nan, 8, 0, nan, nan};  // KV head 1: NaN leaves first
  Placing how{.pins = pins, .room = 6};
  how.order = View<const float, 3>::dense(scores.data(), {1, 2, 10});
  const Lists best(2, {1, 6});
  Edits edits;
  edits.place(best.pages(), how);
  edits.attend_resident(best.pages(), pins);
  edits.attend(best.pages(), pins);
  REQUIRE(store.apply(edits.all(), {slot}).changed == 2 * 4);
  CHECK(pages_on(store, Tier::device, slot, 0) == Pages{0, 1, 4, 6, 8, 9});
  CHECK(pages_on(store, Tier::device, slot, 1) == Pages{0, 1, 3, 6, 8, 9});
  const auto read = [&](std::size_t edit, int head) {
    const IndexList all = store.resolve_attend(edits.all()[edit], {slot}, store.workspace());
    return Pages(&all.index(0, head, 0), &all.index(0, head, 0) + all.count(0, head));
  };
  CHECK(read(1, 0) == Pages{0, 1, 4, 6, 8, 9});
  CHECK(read(1, 1) == Pages{0, 1, 3, 6, 8, 9});
  CHECK(read(2, 1) == Pages{0, 1, 6, 8, 9});
  const std::int32_t rooms[] = {5, 100};
  how.rooms = View<const std::int32_t, 2>::dense(rooms, {1, 2});
  CHECK(place(store, slot, best.pages(), how).changed == 1);
  CHECK(pages_on(store, Tier::device, slot, 0) == Pages{0, 1, 6, 8, 9});
  CHECK(pages_on(store, Tier::device, slot, 1) == Pages{0, 1, 3, 6, 8, 9});
  how.order.extent[2] = 9;
  CHECK_THROWS_WITH(place(store, slot, best.pages(), how), Catch::Contains("an order of 9 pages, wanted 10"));
  how.order.extent[1] = 1;
  CHECK_THROWS_WITH(place(store, slot, best.pages(), how), Catch::Contains("an order of another shape"));
  how.rooms.extent[1] = 1;
  CHECK_THROWS_WITH(place(store, slot, best.pages(), how), Catch::Contains("rooms of fewer rows or heads"));
  store.check_invariants();
}

TEST_CASE("a place edit to come works on the heads that were on when it was given") {
  for (const int steps : {0, 1, 2}) {
    CAPTURE(steps);
    Placed f;
    CpuStore store(f.options);
    const int slot = store.open();
    f.fill(store, slot, 20);
    std::vector<std::uint8_t> flags(6);
    flags[static_cast<std::size_t>(slot * 2 + 1)] = 1;
    const auto of = View<const std::uint8_t, 2>::dense(flags.data(), {3, 2});
    Lists list(2, {1, 2});
    place(store, slot, list.pages(),
          {.heads = Heads::flagged(of),
           .pins = {.first = 2},
           .room = 4,
           .when = steps == 0 ? Deadline{Deadline::next_step} : Deadline::in_steps(steps)});
    list.scribble();
    flags.assign(6, 0);
    const std::vector<std::byte> saved = store.save(slot);
    CpuStore other(f.options);
    REQUIRE(other.open() == 0);
    REQUIRE(other.restore(0, saved) == Fit::ok);
    for (CpuStore* s : {&store, &other}) {
      for (int i = 1; i < steps; ++i) {
        CHECK(pages_on(*s, Tier::host, slot, 1).empty());
        f.fill(*s, slot, 1, true);
      }
      CHECK(pages_on(*s, Tier::device, slot, 1).size() == (steps > 1 ? 6 : 5));
      f.fill(*s, slot, 1, true);
      CHECK(pages_on(*s, Tier::device, slot, 1) == Pages{0, 1, 2, 5});
      CHECK(pages_on(*s, Tier::host, slot, 1) == Pages{0, 1, 2, 3, 4});
      CHECK(pages_on(*s, Tier::host, slot, 0).empty());
      f.fill(*s, slot, 4, true);
      CHECK(pages_on(*s, Tier::device, slot, 1).size() == 5);  // once only
      s->check_invariants();
    }
  }
}

TEST_CASE("a place edit to come waits for pressure, if its list lasts") {
  Placed f;
  f.options.spill = Spill::pressure;
  CpuStore store(f.options);
  const int slot = store.open(), other = store.open();
  f.fill(store, slot, 20);
  f.fill(store, other, 20);
  std::vector<std::int32_t> index(3 * 2 * 4), count(3 * 2, 2);
  for (std::size_t i = 0; i < index.size(); i += 4) index[i] = 1, index[i + 1] = 3;
  PageList list;
  list.index = View<std::int32_t, 3>::dense(index.data(), {3, 2, 4});
  list.count = View<std::int32_t, 2>::dense(count.data(), {3, 2});
  const std::vector<std::int32_t> rows{slot};
  list.slots = rows.data();
  place(store, slot, list, {.when = {Deadline::next_step}});
  f.fill(store, slot, 1, true);
  CHECK(pages_on(store, Tier::host, slot, 0).empty());
  CHECK(store.spare_bytes() > 0);
  place(store, slot, Lists(2, {1, 3}).pages(), {.when = {Deadline::next_step}});  // this list does not last
  f.fill(store, slot, 1, true);
  CHECK(pages_on(store, Tier::device, slot, 0) == Pages{1, 3, 5});
  place(store, slot, list, {.when = {Deadline::next_step}});
  index.assign(index.size(), 0);
  for (std::size_t i = 0; i < index.size(); i += 4) index[i] = 2, index[i + 1] = 4;
  f.fill(store, slot, 1, true);
  CHECK(pages_on(store, Tier::device, slot, 0) == Pages{2, 4, 5});  // it is read when the edit takes effect
  Edits edits;
  edits.offload(list);
  CHECK_THROWS_WITH(store.apply(edits.all(), {slot}), Catch::Contains("a list that lasts"));
  store.check_invariants();
}

TEST_CASE("place works on the heads that are on") {
  Placed f;
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 20);
  const std::uint8_t classes[] = {1, 0};
  place(store, slot, Lists(2, {1}).pages(), {.heads = Heads{}.except(classes)});
  CHECK(pages_on(store, Tier::device, slot, 0) == Pages{0, 1, 2, 3, 4});
  CHECK(pages_on(store, Tier::host, slot, 0).empty());
  CHECK(pages_on(store, Tier::device, slot, 1) == Pages{1, 4});
  std::int32_t steps[] = {3, 3, 3};
  place(store, slot, Lists(2, {2}).pages(), {.heads = Heads::every(steps, 4).except(classes)});
  CHECK(pages_on(store, Tier::device, slot, 1) == Pages{1, 4});
  steps[slot] = 4;
  place(store, slot, Lists(2, {2}).pages(), {.heads = Heads::every(steps, 4).or_of(classes)});
  CHECK(pages_on(store, Tier::device, slot, 0) == Pages{2, 4});
  CHECK(pages_on(store, Tier::device, slot, 1) == Pages{2, 4});
  std::uint8_t flags[] = {0, 1, 0, 1, 0, 1};
  const auto flagged = View<const std::uint8_t, 2>::dense(flags, {3, 2});
  place(store, slot, Lists(2, {0}).pages(), {.heads = Heads::flagged(flagged, false)});
  CHECK(pages_on(store, Tier::device, slot, 0) == Pages{0, 4});
  CHECK(pages_on(store, Tier::device, slot, 1) == Pages{2, 4});
}

TEST_CASE("which heads are on: flags, steps and classes") {
  const std::int32_t steps[] = {0, 5, 8};
  const std::uint8_t classes[] = {0, 1};
  CHECK(Heads{}.on(1, 0));
  CHECK(Heads::every(steps, 4).on(0, 0));
  CHECK_FALSE(Heads::every(steps, 4).on(1, 0));
  CHECK(Heads::every(steps, 4).on(2, 1));
  CHECK_FALSE(Heads::every(steps, 0).on(0, 0));
  CHECK(Heads::every(steps, 0).or_of(classes).on(0, 1));
  CHECK_FALSE(Heads::every(steps, 0).or_of(classes).on(0, 0));
  CHECK(Heads::every(steps, 4).except(classes).on(0, 0));
  CHECK_FALSE(Heads::every(steps, 4).except(classes).on(0, 1));
  CHECK(Heads{}.or_of(nullptr).on(0, 0));
  CHECK(Heads{}.except(nullptr).on(0, 0));
}

TEST_CASE("place takes lists that last, by slot") {
  Placed f;
  CpuStore store(f.options);
  const int first = store.open(), second = store.open();
  f.fill(store, first, 20);
  f.fill(store, second, 20);
  const KeptPages kept("kept", f.options.shape, 4, store.workspace());
  const std::vector<std::int32_t> rows{second, first};
  LayerKv kv;
  kv.pages = store.view(0, rows);
  const PageList list = kept.of(kv);
  for (const int slot : rows)
    for (int h = 0; h < 2; ++h) list.index(slot, h, 0) = slot == second ? 3 : 1, list.count(slot, h) = 1;
  Edits edits;
  edits.place(list, {});
  edits.attend(list);
  REQUIRE(store.apply(edits.all(), rows).fit == Fit::ok);
  CHECK(pages_on(store, Tier::device, first, 0) == Pages{1, 4});
  CHECK(pages_on(store, Tier::device, second, 1) == Pages{3, 4});
  const IndexList attended = store.resolve_attend(edits.all()[1], rows, store.workspace());
  CHECK(attended.index(0, 0, 0) == 3);
  CHECK(attended.index(1, 0, 0) == 1);
  const auto saved = store.save(second);
  store.close(second);
  REQUIRE(store.open() == second);
  CHECK(list.count(second, 0) == 0);  // the next sequence finds an empty list
  REQUIRE(store.restore(second, saved) == Fit::ok);
  CHECK(list.index(second, 1, 0) == 3);
}

namespace {

// Sequences of 20 tokens in a store for 44 device frames, of which each takes 20. Place edits come with lists that
// last.
struct Pressed : Placed {
  static constexpr int frames = 44;
  std::unique_ptr<CpuStore> store;
  std::optional<test::LastingPlaces> lasting;

  explicit Pressed(std::int64_t host_frames = -1) {
    const std::int64_t frame = [&] {
      CpuStore one(options);
      fill(one, one.open(), 1);
      return one.page_bytes(Tier::device) / 4;
    }();
    options.spill = Spill::pressure;
    options.device_limit = frames * frame;
    if (host_frames >= 0) options.host_limit = host_frames * frame;
    store = std::make_unique<CpuStore>(options);
    lasting.emplace(*store);
  }
  // Opens a slot, whose heads shall keep `page` and the newest one.
  int open(int page) {
    const int slot = store->open();
    REQUIRE(fill(*store, slot, 20) == Fit::ok);
    for (int layer = 0; layer < 2; ++layer) place(slot, layer, page);
    return slot;
  }
  Applied place(int slot, int layer, int page) const { return lasting->place(slot, layer, page); }
  Pages device(int slot) const { return pages_on(*store, Tier::device, slot, 1, 1); }
  Pages host(int slot) const { return pages_on(*store, Tier::host, slot, 0, 0); }
};

const Pages all{0, 1, 2, 3, 4};

test::SpillScene scene_of(CpuStore& store, const StoreFixture& f) {
  return {store, [&](int slot, int tokens) { REQUIRE(f.fill(store, slot, tokens) == Fit::ok); },
          [&](int layer, int slot, int head) { return pages_on(store, Tier::device, slot, head, layer); },
          [&](int layer, int slot, int head) { return test::stored_tokens(store, layer, slot, head); }};
}

}  // namespace

TEST_CASE("under pressure pages stay on the device until frames run short, and then one sequence spills") {
  Pressed f;
  const int a = f.open(1), b = f.open(2);
  const auto tokens = test::stored_tokens(*f.store, 1, a, 1);
  CHECK(f.store->fired() == 0);
  CHECK(f.device(a) == all);
  CHECK(f.device(b) == all);
  CHECK(f.host(a).empty());
  CHECK(f.store->spare_bytes() * 20 == f.store->page_bytes(Tier::device) / 2 * 2 * 3 * 4);  // 3 of 5 pages of each head
  CHECK(f.place(a, 0, 3).changed == 0);                                                     // the list may change
  f.place(a, 0, 1);
  const int c = f.open(0);  // 20 frames more: the spills of a give 8 and 4, so b spills in part
  CHECK(f.device(c) == all);
  CHECK(f.device(a) == Pages{1, 4});
  CHECK(f.device(b) == Pages{2, 3, 4});
  CHECK(f.host(a) == all);
  CHECK(test::stored_tokens(*f.store, 1, a, 1) == tokens);
  CHECK(f.place(a, 1, 0).changed == 4);  // from now on the edits of a are carried out
  CHECK(f.device(a) == Pages{0, 4});
  CHECK(f.place(c, 1, 3).changed == 0);
  CHECK(f.device(c) == all);
  f.store->close(a);
  f.store->close(b);
  CHECK(f.open(2) == a);  // there are frames again, and nobody spills
  CHECK(f.device(c) == all);
  CHECK(f.device(a) == all);
  f.store->check_invariants();
}

TEST_CASE("a sequence does not spill while its prompt goes on, nor where the host has no room for it") {
  Pressed small(8);
  const int a = small.open(1), b = small.open(1);
  (void)b;
  CHECK(small.fill(*small.store, small.store->open(), 20) == Fit::out_of_memory);
  CHECK(small.device(a) == all);
  CHECK(small.store->spare_bytes() == 0);
  small.store->check_invariants();

  CHECK(small.store->host_room() == 0);
  CHECK(small.store->page_bytes(Tier::host) == 0);

  Pressed one(20 + 8);  // frames of the host for one of them
  const int x = one.open(1), y = one.open(1);
  CHECK(one.store->spare_bytes() * 40 == one.store->page_bytes(Tier::device) * 3 * 4);
  CHECK(one.store->room_for_step({x, y}));  // 4 frames are free, and 12 are spare
  CHECK(one.store->host_room() == 0);
  Pressed both(60);
  both.open(1), both.open(1);
  CHECK(both.store->host_room() == 60 - 2 * (20 + 4));  // their pages, and one more of each head

  Pressed brim(20 + 4);
  const int p = brim.open(1);
  brim.open(1);
  REQUIRE(brim.fill(*brim.store, brim.store->open(), 8) == Fit::ok);  // p spills and leaves 8 frames
  CHECK(brim.store->room_for_step({p}));
  REQUIRE(brim.fill(*brim.store, p, 4) == Fit::ok);
  for (int layer = 0; layer < 2; ++layer) brim.place(p, layer, 1);
  CHECK_FALSE(brim.store->room_for_step({p}));  // the host has no frame left for the pages of the step

  Pressed narrow(8);
  const int v = narrow.open(1), w = narrow.open(1);
  CHECK_FALSE(narrow.store->room_for_step({v, w}));
  CHECK(narrow.store->room_for_step({v}));

  Pressed f;
  const int first = f.open(1), second = f.open(1);
  for (int layer = 0; layer < 2; ++layer) REQUIRE(f.store->recall_all(layer, first) == Fit::ok);
  CHECK(f.store->spare_bytes() * 20 == f.store->page_bytes(Tier::device) / 2 * 3 * 4);
  CHECK(f.fill(*f.store, f.store->open(), 12) == Fit::ok);
  CHECK(f.device(first) == all);
  CHECK(f.device(second) == Pages{1, 3, 4});
  f.store->check_invariants();
}

// The same on a GPU: core/test/cuda/place_test.cpp.
TEST_CASE("when frames run short the pages leave first that the order ranks lowest, a part of them at a time") {
  for (const bool ordered : {true, false}) {
    CAPTURE(ordered);
    Placed f;
    f.options.spill = Spill::pressure;
    f.options.device_limit = 48 * frame_layout(f.options, {}).bytes;
    CpuStore store(f.options);
    check_order_of_leaving(scene_of(store, f), ordered, 0);
    CHECK(f.fill(store, 0, 4) == Fit::out_of_memory);
  }
}

TEST_CASE("a sequence that comes back spills as it would have, and only if it had or frames run short") {
  Placed f;
  f.options.spill = Spill::pressure;
  f.options.device_limit = 48 * frame_layout(f.options, {}).bytes;
  CpuStore store(f.options), fresh(f.options);
  check_spills_after_restore(scene_of(store, f), scene_of(fresh, f), 0);
}

TEST_CASE("each part of a spill gives frames back where heads of a layer differ much in length") {
  for (const bool both : {true, false}) {
    CAPTURE(both);
    Placed f;
    f.options.shape.layers = 1, f.options.shape.max_tokens = 256, f.options.spill = Spill::pressure;
    f.options.device_limit = 120 * frame_layout(f.options, {}).bytes;
    CpuStore store(f.options);
    const int a = store.open(), b = store.open();
    REQUIRE(f.fill(store, a, 240) == Fit::ok);
    PerHead gone(2);
    for (int t = 40; t < 240; ++t) gone[1].push_back(t);
    const Lists leaves(gone);
    Edits shorter;
    shorter.evict(leaves.tokens());
    REQUIRE(store.apply(shorter.all(), {a}).fit == Fit::ok);
    REQUIRE(f.fill(store, b, 100) == Fit::ok);  // all frames
    const std::uint8_t long_one[] = {1, 0};
    check_ragged_spill(scene_of(store, f), a, b, both, long_one);
  }
}

// A prompt that leaves nothing to spare may have grown since.
TEST_CASE("pages that steps have added spill, too") {
  Placed f;
  f.options.spill = Spill::pressure;
  const std::int64_t frame = frame_layout(f.options, {}).bytes;
  f.options.device_limit = 4 * 12 * frame;
  CpuStore store(f.options);
  const test::LastingPlaces places(store);
  const int a = store.open(), b = store.open();
  REQUIRE(f.fill(store, a, 8) == Fit::ok);
  for (int layer = 0; layer < 2; ++layer) places.place(a, layer, 0);
  CHECK(store.spare_bytes() == 0);
  for (int i = 0; i < 24; ++i) REQUIRE(f.fill(store, a, 1, true) == Fit::ok);
  const auto before = test::stored_tokens(store, 1, a, 1);
  REQUIRE(f.fill(store, b, 16) == Fit::ok);  // 8 and 4 pages of each head: no frame is free
  CHECK(store.room_for_step({a, b}));
  CHECK(store.spare_bytes() == 4 * 6 * frame);
  REQUIRE(f.fill(store, b, 4) == Fit::ok);
  CHECK(store.spill_rounds() == 1);
  CHECK(pages_on(store, Tier::device, a, 1, 1) == Pages{0, 4, 5, 6, 7});
  CHECK(test::stored_tokens(store, 1, a, 1) == before);
  store.check_invariants();
}

TEST_CASE("a sequence that has spilled in part goes on before another begins, and a new prompt spills it as a whole") {
  Pressed f;
  const int a = f.open(1);
  REQUIRE(f.fill(*f.store, f.store->open(), 20) == Fit::ok);
  const int c = f.store->open();
  REQUIRE(f.fill(*f.store, c, 8) == Fit::ok);  // 8 frames of 4 and 8
  CHECK(f.device(a) == Pages{1, 3, 4});
  f.store->close(c);
  for (int layer = 0; layer < 2; ++layer) REQUIRE(f.store->recall_all(layer, a) == Fit::ok);
  CHECK(f.device(a) == all);
  CHECK(f.store->spare_bytes() == 0);
  for (int layer = 0; layer < 2; ++layer) f.place(a, layer, 2);
  CHECK(f.device(a) == Pages{2, 4});

  Pressed g;
  const int first = g.open(1), second = g.open(2), third = g.store->open();
  REQUIRE(g.fill(*g.store, third, 8) == Fit::ok);
  CHECK(g.device(first) == Pages{1, 3, 4});
  CHECK(g.device(second) == all);
  REQUIRE(g.fill(*g.store, third, 8) == Fit::ok);
  CHECK(g.device(first) == Pages{1, 4});
  CHECK(g.device(second) == all);
  REQUIRE(g.fill(*g.store, third, 4) == Fit::ok);
  CHECK(g.device(second) == Pages{2, 3, 4});
  g.store->check_invariants();
}

// The arena's frames are taken in order.
TEST_CASE("pages of a head that are written down together lie side by side on the host") {
  Placed f;
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 46);
  place(store, slot, Lists(2, {2, 5}).pages(), {});
  const std::vector<std::int32_t> rows{slot};
  const PagedKv below = store.view(0, rows, Tier::host);
  const auto step = static_cast<std::int32_t>(frame_layout(f.options, {}).bytes / granule_bytes);
  for (int head = 0; head < 2; ++head)
    for (int page = 1; page < 11; ++page)
      CHECK(below.entry(0, head, page).frame == below.entry(0, head, page - 1).frame + step);
}

TEST_CASE("under pressure an edit whose list does not last is carried out at once") {
  Pressed f;
  const int a = f.open(1);
  CHECK(place(*f.store, a, Lists(2, {2}).pages(), {}).changed == 2 * 3);
  CHECK(pages_on(*f.store, Tier::device, a, 0) == Pages{2, 4});
  CHECK(f.device(f.open(3)) == Pages{3, 4});
}

TEST_CASE("what place cannot do is refused or reported") {
  StoreFixture plain;
  CpuStore without(plain.options);
  const int slot = without.open();
  plain.fill(without, slot, 20);
  CHECK_THROWS_WITH(place(without, slot, Lists(2, {1}).pages(), {}), Catch::Contains("host_pages"));
  Placed f;
  CpuStore store(f.options);
  REQUIRE(store.open() == slot);
  f.fill(store, slot, 20);
  CHECK_THROWS_WITH(place(store, slot, Lists(2, {5}).pages(), {}), Catch::Contains("wanted 0 to 4"));
  const std::int32_t rooms[] = {2, 2};
  Placing later{.when = Deadline::in_steps(2)};
  later.rooms = View<const std::int32_t, 2>::dense(rooms, {1, 2});
  CHECK_THROWS_WITH(place(store, slot, Lists(2, {1}).pages(), later), Catch::Contains("wanted `room`"));
  CHECK_THROWS_WITH(place(store, slot, Lists(2, {1}).pages(), {.when = {Deadline::sequence}}),
                    Catch::Contains("Needs::pauses"));
  const std::int64_t frame = store.page_bytes(Tier::device) / (2 * 2 * 5);
  f.options.host_limit = 3 * frame;
  CpuStore small(f.options);
  REQUIRE(small.open() == slot);
  f.fill(small, slot, 20);
  const auto before = test::stored_tokens(small, 0, slot, 0);
  CHECK(place(small, slot, Lists(2, {1}).pages(), {}).fit == Fit::out_of_memory);
  CHECK(test::stored_tokens(small, 0, slot, 0) == before);
  small.check_invariants();
}
