// Edits::archive copies heads to the host, and Edits::fetch brings tokens back.
#include <kvlab/error.hpp>
#include <kvlab/policy.hpp>

#include <catch2/catch.hpp>

#include "support/store_fixture.hpp"

using namespace kvlab;
using test::Lists;
using test::PerHead;
using test::StoreFixture;

namespace {

using Tokens = std::vector<test::StoredToken>;
using Places = std::vector<std::int32_t>;

struct Archived : StoreFixture {
  Archived() {
    options.archive = true;
    options.token_state = {"score"};
  }
  std::int64_t frame() const { return frame_layout(options, options.host_codec).bytes; }
};

Applied archive(Store& store, int slot, const Heads& heads, int layer = 0) {
  Edits edits(layer);
  edits.archive(heads);
  return store.apply(edits.all(), {slot});
}

Applied fetch(Store& store, int slot, const PerHead& places, const Fetching& how = {}, int layer = 0) {
  const Lists lists(places);
  Edits edits(layer);
  edits.fetch(lists.tokens(), how);
  return store.apply(edits.all(), {slot});
}

void keep(Store& store, int slot, const PerHead& kept, int layer = 0) {
  const Lists lists(kept);
  Edits edits(layer);
  edits.evict_rest(lists.tokens());
  REQUIRE(store.apply(edits.all(), {slot}).fit == Fit::ok);
}

// The places of `before`, and from the count of places on the tokens of `now`.
Tokens fetched(const Tokens& before, const Places& places, const Tokens& now) {
  Tokens out = now;
  for (std::size_t i = 0; i < places.size(); ++i) out[i] = before[static_cast<std::size_t>(places[i])];
  return out;
}

void set_state(const Store& store, int slot, int head) {
  const std::vector<std::int32_t> slots{slot};
  const PagedKv kv = store.view(0, slots);
  for (int t = 0; t < store.length(0, slot, head); ++t) {
    const PageEntry& e = kv.entry(0, head, t / kv.page_size);
    const float x = static_cast<float>(100 * head + t);
    std::memcpy(kv.frame(e) + kv.layout(e).state + t % kv.page_size * 4, &x, 4);
  }
}

}  // namespace

TEST_CASE("fetch brings the archived tokens of these places, and other heads stay") {
  Archived f;
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 18);
  for (const int head : {0, 1}) set_state(store, slot, head);
  const Tokens before[] = {test::stored_tokens(store, 0, slot, 0), test::stored_tokens(store, 0, slot, 1)};
  const std::uint8_t classes[] = {1, 0};
  REQUIRE(archive(store, slot, Heads{}.except(classes)).fit == Fit::ok);
  CHECK(store.archived(0, slot, 0) == 0);
  CHECK(store.archived(0, slot, 1) == 18);
  CHECK(store.archived(1, slot, 1) == 0);
  CHECK(store.page_bytes(Tier::host) == 5 * f.frame());
  CHECK(store.ledger().moved_total(Tier::host) == 5 * f.frame());
  CHECK(store.fired() == 0);
  REQUIRE(archive(store, slot, Heads{}).fit == Fit::ok);  // replaces the archive that there was
  CHECK(store.page_bytes(Tier::host) == 10 * f.frame());
  store.check_invariants();

  keep(store, slot, {{3, 4, 9, 11, 16, 17}, {0, 1, 2}});
  f.fill(store, slot, 2, true);  // in the archive are the prompt's tokens alone
  CHECK(store.archived(0, slot, 0) == 18);
  const Tokens kept[] = {test::stored_tokens(store, 0, slot, 0), test::stored_tokens(store, 0, slot, 1)};
  const std::int64_t read = store.ledger().moved_total(Tier::device);
  const Places places{0, 3, 4, 13, 17};
  const auto fired = store.fired();
  const std::uint8_t last[] = {0, 1};
  CHECK(fetch(store, slot, {places, {1}}, {.heads = Heads{}.except(last)}).changed == 5);
  CHECK(store.fired() == fired + 1);
  CHECK(store.ledger().moved_total(Tier::device) - read == 5 * (2 * 8 * 4 + 4 + 4));
  CHECK(test::stored_tokens(store, 0, slot, 0) == fetched(before[0], places, kept[0]));
  CHECK(test::stored_tokens(store, 0, slot, 1) == kept[1]);
  CHECK(fetch(store, slot, {{}, {2, 5}}).changed == 2);
  CHECK(test::stored_tokens(store, 0, slot, 0) == fetched(before[0], places, kept[0]));
  CHECK(test::stored_tokens(store, 0, slot, 1) == fetched(before[1], {2, 5}, kept[1]));
  CHECK(store.length(0, slot, 1) == 5);
  store.check_invariants();

  store.close(slot);
  CHECK(store.page_bytes(Tier::host) == 0);
  CHECK(store.archived(0, slot, 0) == 0);
  store.check_invariants();
}

TEST_CASE("an archive is saved and restored, and so is a fetch to come") {
  Archived f;
  CpuStore store(f.options), other(f.options);
  const int slot = store.open();
  REQUIRE(other.open() == slot);
  f.fill(store, slot, 18);
  const Tokens before = test::stored_tokens(store, 0, slot, 1);
  const std::uint8_t classes[] = {1, 0};
  archive(store, slot, Heads{}.except(classes));
  keep(store, slot, {{0, 1, 2}, {5, 6, 7}});
  const Tokens kept = test::stored_tokens(store, 0, slot, 1);
  std::vector<std::uint8_t> flags{0, 1, 0, 0, 0, 0};
  const Heads last = Heads::flagged(View<const std::uint8_t, 2>::dense(flags.data(), {3, 2}));
  REQUIRE(fetch(store, slot, {{}, {4, 16}}, {.heads = last, .when = Deadline::in_steps(2)}).fit == Fit::ok);
  REQUIRE(fetch(store, slot, {{}, {3, 16, 17}}, {.heads = last, .when = {Deadline::next_step}}).fit == Fit::ok);
  flags[1] = 0;
  const std::vector<std::byte> saved = store.save(slot);
  REQUIRE(other.restore(slot, saved) == Fit::ok);
  CHECK(other.save(slot) == saved);
  CHECK(other.page_bytes(Tier::host) == 5 * f.frame());
  for (CpuStore* s : {&store, &other}) {
    CHECK(test::stored_tokens(*s, 0, slot, 1) == kept);
    f.fill(*s, slot, 1, true);
    Tokens wanted = fetched(before, {3, 16, 17}, kept);
    Tokens got = test::stored_tokens(*s, 0, slot, 1);
    got.resize(3);
    CHECK(got == wanted);
    f.fill(*s, slot, 1, true);
    wanted = fetched(before, {4, 16}, wanted);
    got = test::stored_tokens(*s, 0, slot, 1);
    got.resize(3);
    CHECK(got == wanted);
    s->check_invariants();
  }

  CpuStore without(StoreFixture{}.options);
  CHECK_THROWS_WITH(without.restore(without.open(), saved), Catch::Contains("another model"));
  f.options.host_limit = 4 * f.frame();
  CpuStore small(f.options);
  CHECK(small.restore(small.open(), saved) == Fit::out_of_memory);
  CHECK(small.page_bytes(Tier::host) == 0);
  small.check_invariants();
}

TEST_CASE("a damaged archive is refused, and the store goes on") {
  Archived f;
  CpuStore store(f.options);
  const int slot = store.open(), other = store.open();
  f.fill(store, slot, 9);
  archive(store, slot, {});
  const std::vector<std::byte> bytes = store.save(slot);
  const auto refused = [&](const std::vector<std::byte>& bad) {
    try {
      store.restore(other, bad);
      FAIL("a broken snapshot was taken");
    } catch (const Error& e) {
      REQUIRE(e.code() == Errc::data);
    }
    store.check_invariants();
  };
  for (std::size_t at = 0; at < bytes.size(); at += 29) {
    CAPTURE(at);
    refused({bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(at)});
    auto bad = bytes;
    bad[at] ^= std::byte{0x41};
    refused(bad);
  }
  CHECK(store.page_bytes(Tier::host) == 2 * 3 * f.frame());
  CHECK(store.restore(other, bytes) == Fit::ok);
  CHECK(store.page_bytes(Tier::host) == 2 * 2 * 3 * f.frame());
}

TEST_CASE("fetch takes lists that last, by slot") {
  Archived f;
  CpuStore store(f.options);
  const int first = store.open(), second = store.open();
  f.fill(store, first, 12);
  f.fill(store, second, 9);
  const Tokens before = test::stored_tokens(store, 0, second, 1), stays = test::stored_tokens(store, 0, first, 0);
  for (const int slot : {first, second}) archive(store, slot, {});
  const KeptPages kept("kept", f.options.shape, 4, store.workspace());
  const std::vector<std::int32_t> rows{second, first};
  LayerKv kv;
  kv.pages = store.view(0, rows);
  const TokenList list{kept.of(kv)};
  for (int h = 0; h < 2; ++h) list.index(second, h, 0) = 3, list.index(second, h, 1) = 8, list.count(second, h) = 2;
  Edits edits;
  edits.fetch(list, {});
  CHECK(store.apply(edits.all(), rows).changed == 4);
  CHECK(test::stored_tokens(store, 0, second, 1) == fetched(before, {3, 8}, before));
  CHECK(test::stored_tokens(store, 0, first, 0) == stays);
}

TEST_CASE("what archive and fetch cannot do is refused or reported") {
  StoreFixture plain;
  CpuStore without(plain.options);
  const int slot = without.open();
  plain.fill(without, slot, 20);
  CHECK_THROWS_WITH(archive(without, slot, {}), Catch::Contains("without Needs::archive"));
  CHECK_THROWS_WITH(fetch(without, slot, {{0}, {0}}), Catch::Contains("without Needs::archive"));

  Archived f;
  CpuStore store(f.options);
  REQUIRE(store.open() == slot);
  f.fill(store, slot, 20);
  CHECK_THROWS_WITH(fetch(store, slot, {{0}, {0}}), Catch::Contains("place 0") && Catch::Contains("length 0"));
  archive(store, slot, {});
  keep(store, slot, {{0, 1}, {0, 1}});
  const auto refused = [&](const Places& places, const char* why) {
    const auto before = test::stored_tokens(store, 0, slot, 1);
    try {
      fetch(store, slot, {{}, places});
      FAIL("not refused");
    } catch (const Error& e) {
      CHECK(e.code() == Errc::plugin);
      CHECK_THAT(e.what(), Catch::Contains(why));
    }
    CHECK(test::stored_tokens(store, 0, slot, 1) == before);
    store.check_invariants();
  };
  refused({1, 20}, "place 20");
  refused({-1, 2}, "place -1");
  refused({4, 4}, "ascend");
  refused({5, 4}, "ascend");
  refused({1, 2, 3}, "3 tokens to fetch, wanted at most the 2");
  CHECK_THROWS_WITH(fetch(store, slot, {{0}, {0}}, {.when = {Deadline::this_attention}}),
                    Catch::Contains("this attention"));
  CHECK_THROWS_WITH(fetch(store, slot, {{0}, {0}}, {.when = {Deadline::sequence}}), Catch::Contains("place edit"));
  Edits offload;
  const Lists pages(2, {0});
  offload.offload(pages.pages());
  CHECK_THROWS_WITH(store.apply(offload.all(), {slot}), Catch::Contains("offload"));
  store.in_graph(true);
  CHECK_THROWS_WITH(archive(store, slot, {}), Catch::Contains("capturable"));
  store.in_graph(false);

  // Each head's archive takes 5 frames, and only one fits.
  f.options.host_limit = 9 * f.frame();
  CpuStore small(f.options);
  REQUIRE(small.open() == slot);
  f.fill(small, slot, 20);
  CHECK(archive(small, slot, {}).fit == Fit::out_of_memory);
  small.check_invariants();
  small.close(slot);
  CHECK(small.page_bytes(Tier::host) == 0);

  const auto unsupported = [&](auto change, const char* why) {
    StoreOptions o = Archived().options;
    change(o);
    for (const Device device : {Device::cpu, Device::cuda})
      CHECK_THROWS_WITH(check_store(o, device), Catch::Contains("Needs::archive") && Catch::Contains(why));
  };
  unsupported([](StoreOptions& o) { o.host_pages = true; }, "host_pages");
  unsupported([](StoreOptions& o) { o.summary = Summary::mean; }, "summaries");
  unsupported([](StoreOptions& o) { o.rope = RopeRegime::re_rotate; }, "re_rotate");
  unsupported([](StoreOptions& o) { o.host_codec = CodecSpec{{8}, {8}}; }, "codec");
  unsupported([](StoreOptions& o) { o.codecs.resize(2); }, "codec");
}
