// Append and every edit verb of the store, on tokens whose bytes are known.
#include <kvlab/error.hpp>
#include <kvlab/ops.hpp>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>

#include "ops/page/paged.hpp"
#include "support/store_fixture.hpp"

using namespace kvlab;
using test::Lists;
using test::on;
using test::PerHead;
using test::StoreFixture;

namespace {

std::vector<std::int32_t> range(int first, int last) {  // [first, last)
  std::vector<std::int32_t> out;
  for (int i = first; i < last; ++i) out.push_back(i);
  return out;
}

// The slot must hold exactly the wanted positions, each with its own bytes.
void check_tokens(const StoreFixture& f, const Store& store, int layer, int slot, int head,
                  const std::vector<std::int32_t>& wanted) {
  CHECK(store.positions(layer, slot, head) == wanted);
  for (const auto& t : test::stored_tokens(store, layer, slot, head)) {
    CHECK(t.k == f.row(0, layer, slot, head, t.position));
    CHECK(t.v == f.row(1, layer, slot, head, t.position));
  }
  store.check_invariants();
}

void check_summaries(const Store& store, int layer, int slot, int head) {
  const Shape& s = store.shape();
  const auto tokens = test::stored_tokens(store, layer, slot, head);
  const Summaries summaries = store.summaries(layer);
  for (int page = 0; page * s.page_size < static_cast<int>(tokens.size()); ++page)
    for (int d = 0; d < s.head_dim; ++d) {
      float lo = INFINITY, hi = -INFINITY, got[2];
      for (int t = page * s.page_size; t < std::min((page + 1) * s.page_size, static_cast<int>(tokens.size())); ++t) {
        lo = std::min(lo, tokens[static_cast<std::size_t>(t)].k[static_cast<std::size_t>(d)]);
        hi = std::max(hi, tokens[static_cast<std::size_t>(t)].k[static_cast<std::size_t>(d)]);
      }
      std::memcpy(&got[0], summaries.at(slot, head, page) + d * 4, 4);
      std::memcpy(&got[1], summaries.at(slot, head, page) + (s.head_dim + d) * 4, 4);
      REQUIRE(got[0] == lo);
      REQUIRE(got[1] == hi);
    }
}

Applied one(Store& store, int slot, Edits& edits) { return store.apply(edits.all(), {slot}); }

}  // namespace

TEST_CASE("page summaries in codes are those of the pages after each edit, are saved, and cost fewer bytes") {
  StoreFixture f;
  f.options.summary = GENERATE(Summary::min_max, Summary::mean, Summary::centre_radius);
  f.options.summary_bits = 8;
  CpuStore store(f.options);
  const Shape& s = f.options.shape;
  const auto check = [&](const Store& of, int slot) {
    std::int64_t pages = 0;
    for (int layer = 0; layer < s.layers; ++layer)
      for (int head = 0; head < s.kv_heads; ++head) {
        const auto tokens = test::stored_tokens(of, layer, slot, head);
        const Summaries summaries = of.summaries(layer);
        REQUIRE(summaries.bits == 8);
        const int p = s.page_size, all = static_cast<int>(tokens.size());
        for (int page = 0; page * p < all; ++page, ++pages) {
          const PageLayout l = ops::make_layout(s.dtype, {}, p, s.head_dim, 0);
          std::vector<std::byte> frame(static_cast<std::size_t>(l.bytes)),
              wanted(static_cast<std::size_t>(summaries.page_stride));
          const int n = std::min(p, all - page * p);
          for (int t = 0; t < n; ++t) {
            const auto& token = tokens[static_cast<std::size_t>(page * p + t)];
            ops::write_token(frame.data(), l, t, token.k.data(), token.v.data(), token.position);
          }
          ops::summarize_page(frame.data(), l, n, f.options.summary, s.dtype, wanted.data(), 8);
          REQUIRE(std::memcmp(summaries.at(slot, head, page), wanted.data(), wanted.size()) == 0);
        }
      }
    const std::int64_t bytes = f.options.summary == Summary::mean ? 16 : 32;  // of 32 and 64
    CHECK(of.ledger().held(Tier::device)[static_cast<int>(Tag::summaries)] == bytes * pages);
    of.check_invariants();
  };
  const int slot = store.open();
  f.fill(store, slot, 18);
  check(store, slot);
  f.fill(store, slot, 1, true);
  check(store, slot);
  Lists pages(2, {1, 2}), tokens(2, {2, 6, 17});
  Edits e;
  e.offload(pages.pages());
  e.evict(tokens.tokens());
  one(store, slot, e);
  check(store, slot);
  for (int i = 0; i < 5; ++i) f.fill(store, slot, 1, true);
  check(store, slot);
  CpuStore other(f.options);
  const std::vector<std::byte> saved = store.save(slot);
  const int back = other.open();
  REQUIRE(other.restore(back, saved) == Fit::ok);
  check(other, back);
  f.options.summary_bits = 16;
  CpuStore of_numbers(f.options);
  const int none = of_numbers.open();
  CHECK_THROWS_AS(of_numbers.restore(none, saved), Error);
}

TEST_CASE("append fills pages in text order and keeps counts, summaries and the ledger") {
  StoreFixture f;
  f.options.summary = Summary::min_max;
  CpuStore store(f.options);
  const int slot = store.open();
  int n = 0;
  for (int tokens : {1, 2, 1, 7, 13, 1}) {
    REQUIRE(f.fill(store, slot, tokens, tokens == 1) == Fit::ok);
    n += tokens;
    for (int layer = 0; layer < 2; ++layer)
      for (int head = 0; head < 2; ++head) {
        CHECK(store.length(layer, slot, head) == n);
        check_tokens(f, store, layer, slot, head, range(0, n));
        check_summaries(store, layer, slot, head);
      }
  }
  CHECK(store.position(slot) == 25);
  CHECK(store.steps(slot) == 3);
  const std::vector<std::int32_t> slots{slot};
  const PagedKv kv = store.view(1, slots);
  CHECK(kv.pages(0, 0) == 7);
  CHECK(kv.entry(0, 0, 5).tokens == 4);
  CHECK(kv.entry(0, 0, 6).tokens == 1);
  // 7 pages x 2 heads x 2 layers; K and V have 4 tokens x 8 f32 each. Positions end the frame, padded to a granule.
  const auto& held = store.ledger().held(Tier::device);
  CHECK(held[static_cast<int>(Tag::keys)] == 28 * 4 * 8 * 4);
  CHECK(held[static_cast<int>(Tag::values)] == 28 * 4 * 8 * 4);
  CHECK(held[static_cast<int>(Tag::positions)] == 28 * (384 - 2 * 4 * 8 * 4));
  CHECK(held[static_cast<int>(Tag::summaries)] == 28 * 2 * 8 * 4);
  store.close(slot);
  CHECK(held[static_cast<int>(Tag::keys)] == 0);
  CHECK(held[static_cast<int>(Tag::summaries)] == 0);
}

TEST_CASE("evict: few tokens leave by filling holes, many by moving up; other heads and layers stay") {
  StoreFixture f;
  f.options.summary = Summary::min_max;
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 30);
  SECTION("one") {
    Lists l(PerHead{{3}, {}});
    Edits e(1);
    e.evict(l.tokens());
    CHECK(one(store, slot, e).changed == 1);
    auto wanted = range(0, 30);
    wanted.erase(wanted.begin() + 3);
    check_tokens(f, store, 1, slot, 0, wanted);
    // Only one token was copied: the last one took the place.
    CHECK(test::stored_tokens(store, 1, slot, 0)[3].position == 29);
  }
  SECTION("many") {
    Lists l(PerHead{range(2, 28), {}});
    Edits e(1);
    e.evict(l.tokens());
    CHECK(one(store, slot, e).changed == 26);
    check_tokens(f, store, 1, slot, 0, {0, 1, 28, 29});
    CHECK_FALSE(on(store, Tier::device, 1, slot, 0, 1));
  }
  SECTION("rest, few") {
    auto kept = range(0, 30);
    kept.erase(kept.begin() + 10, kept.begin() + 13);
    Lists l(PerHead{kept, range(0, 30)});
    Edits e(1);
    e.evict_rest(l.tokens());
    CHECK(one(store, slot, e).changed == 3);
    check_tokens(f, store, 1, slot, 0, kept);
  }
  SECTION("rest, many, in order") {
    Lists l(PerHead{{0, 5, 11, 29}, range(0, 30)});
    Edits e(1);
    e.evict_rest(l.tokens());
    CHECK(one(store, slot, e).changed == 26);
    check_tokens(f, store, 1, slot, 0, {0, 5, 11, 29});
    CHECK(test::stored_tokens(store, 1, slot, 0)[2].position == 11);
  }
  SECTION("everything") {
    Lists l(PerHead{{}, range(0, 30)});
    Edits e(1);
    e.evict_rest(l.tokens());
    CHECK(one(store, slot, e).changed == 30);
    check_tokens(f, store, 1, slot, 0, {});
  }
  check_summaries(store, 1, slot, 0);
  check_tokens(f, store, 1, slot, 1, range(0, 30));
  check_tokens(f, store, 0, slot, 0, range(0, 30));
  // The freed places serve the next tokens.
  REQUIRE(f.fill(store, slot, 5) == Fit::ok);
  check_summaries(store, 1, slot, 0);
  check_tokens(f, store, 1, slot, 1, range(0, 35));
  CHECK(store.positions(1, slot, 0).back() == 34);
}

TEST_CASE("evict_surplus: the lowest tokens leave by score, by a column of token state or by age; pins stay") {
  StoreFixture f;
  f.options.summary = Summary::min_max;
  f.options.token_state = {"other", "rank"};
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 30);
  const std::vector<std::int32_t> slots{slot};
  std::vector<std::int32_t> keep{29, 30};
  Surplus s;
  s.keep = View<const std::int32_t, 2>::dense(keep.data(), {1, 2});
  // Place 11 has the lowest rank, then places 4 and 20 with equal ones.
  std::vector<float> rank(60, 5.f);
  rank[11] = -1.f, rank[4] = rank[20] = 0.f;
  const auto scores = View<const float, 3>::dense(rank.data(), {1, 2, 30});
  const auto evicted = [&] {
    Edits e(1);
    e.evict_surplus(s);
    return one(store, slot, e).changed;
  };
  const auto without = [](std::vector<std::int32_t> from, const std::vector<std::int32_t>& lost) {
    for (const int t : lost) from.erase(std::find(from.begin(), from.end(), t));
    return from;
  };
  SECTION("by age") {
    CHECK(evicted() == 1);
    check_tokens(f, store, 1, slot, 0, range(1, 30));
    CHECK(test::stored_tokens(store, 1, slot, 0)[0].position == 29);
    keep[0] = 27;
    CHECK(evicted() == 2);
    check_tokens(f, store, 1, slot, 0, range(3, 30));
  }
  SECTION("by age, after the first tokens") {
    const Pins pins{4, 25};
    s.pins = &pins;
    CHECK(evicted() == 1);
    check_tokens(f, store, 1, slot, 0, without(range(0, 30), {4}));
  }
  SECTION("by score") {
    s.scores = scores;
    CHECK(evicted() == 1);
    check_tokens(f, store, 1, slot, 0, without(range(0, 30), {11}));
    CHECK(test::stored_tokens(store, 1, slot, 0)[11].position == 29);
  }
  SECTION("by score, the later of two equal tokens first") {
    s.scores = scores;
    keep[0] = 28;
    CHECK(evicted() == 2);
    check_tokens(f, store, 1, slot, 0, without(range(0, 30), {11, 20}));
  }
  SECTION("by score, beside pins that exceed what is kept") {
    const Pins pins{12, 17};
    s.pins = &pins;
    s.scores = scores;
    keep[0] = 3;
    CHECK(evicted() == 1);
    check_tokens(f, store, 1, slot, 0, without(range(0, 30), {12}));
  }
  SECTION("by the second column, from pages on either tier") {
    const PagedKv kv = store.view(1, slots);
    ops::blend_state({&kv, 1}, 0, scores, 1, Stream::cpu());
    Lists l(PerHead{{1, 2}, {}});
    Edits e(1);
    e.offload(l.pages());
    e.drop(Tier::device, l.pages());
    one(store, slot, e);
    s.column = 1;
    CHECK(evicted() == 1);
    check_tokens(f, store, 1, slot, 0, without(range(0, 30), {11}));
  }
  SECTION("wrong arguments are refused") {
    s.column = 2;
    CHECK_THROWS_WITH(evicted(), Catch::Contains("got column 2 of token state, wanted less than 2"));
    s.column = -1;
    s.scores = View<const float, 3>::dense(rank.data(), {1, 2, 29});
    keep[0] = 20;
    CHECK_THROWS_WITH(evicted(), Catch::Contains("got scores of 29 tokens, wanted 30"));
    s.scores = View<const float, 3>::dense(rank.data(), {1, 1, 30});
    CHECK_THROWS_WITH(evicted(), Catch::Contains("got scores of another shape"));
    s.scores = {};
    s.keep = View<const std::int32_t, 2>::dense(keep.data(), {1, 1});
    CHECK_THROWS_WITH(evicted(), Catch::Contains("got numbers to keep of fewer rows or heads"));
    check_tokens(f, store, 1, slot, 0, range(0, 30));
  }
  check_summaries(store, 1, slot, 0);
  check_tokens(f, store, 1, slot, 1, range(0, 30));
  check_tokens(f, store, 0, slot, 0, range(0, 30));
}

TEST_CASE("offload, drop and recall keep the bytes and count what moved") {
  StoreFixture f;
  f.options.summary = Summary::min_max;
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 14);
  Lists three(2, {0, 1, 2});
  const std::int64_t frame = 2 * 4 * 8 * 4 + 128;
  Edits down;
  down.offload(three.pages());
  CHECK(one(store, slot, down).changed == 6);
  CHECK(store.ledger().moved_total(Tier::host) == 6 * frame);
  CHECK(one(store, slot, down).changed == 0);  // a valid lower copy is not written again
  CHECK(store.ledger().moved_total(Tier::host) == 6 * frame);
  Edits drop;
  drop.drop(Tier::device, three.pages());
  CHECK(one(store, slot, drop).changed == 6);
  CHECK_FALSE(on(store, Tier::device, 0, slot, 0, 1));
  check_tokens(f, store, 0, slot, 0, range(0, 14));
  check_summaries(store, 0, slot, 0);
  CHECK(store.ledger().total(Tier::host) == 6 * frame);
  Edits up;
  Lists middle(2, {1});
  up.recall(middle.pages());
  CHECK(one(store, slot, up).changed == 2);
  CHECK(one(store, slot, up).changed == 0);
  CHECK(store.ledger().moved_total(Tier::device) == 2 * frame);
  CHECK(on(store, Tier::device, 0, slot, 0, 1));
  CHECK(on(store, Tier::host, 0, slot, 0, 1));
  check_tokens(f, store, 0, slot, 0, range(0, 14));

  SECTION("the only copy is not dropped") {
    Lists first(2, {0}), last(2, {3});
    Edits bad;
    bad.drop(Tier::host, first.pages());
    CHECK_THROWS_AS(one(store, slot, bad), Error);
    Edits worse;
    worse.drop(Tier::device, last.pages());
    CHECK_THROWS_AS(one(store, slot, worse), Error);
    check_tokens(f, store, 0, slot, 0, range(0, 14));
  }
  SECTION("an eviction that touches a page makes its lower copy stale") {
    Lists places(2, {5});
    Edits evict;
    evict.evict(places.tokens());
    one(store, slot, evict);
    CHECK_FALSE(on(store, Tier::host, 0, slot, 0, 1));
    CHECK(on(store, Tier::host, 0, slot, 0, 2));
    auto wanted = range(0, 14);
    wanted.erase(wanted.begin() + 5);
    check_tokens(f, store, 0, slot, 0, wanted);
    check_summaries(store, 0, slot, 0);
  }
  SECTION("an eviction works on the host where the page is only there") {
    Lists places(2, {0, 9});
    Edits evict;
    evict.evict(places.tokens());
    one(store, slot, evict);
    auto wanted = range(0, 14);
    wanted.erase(wanted.begin() + 9);
    wanted.erase(wanted.begin());
    check_tokens(f, store, 0, slot, 0, wanted);
    check_summaries(store, 0, slot, 0);
  }
  SECTION("appending to a page that is only on the host brings it up") {
    Lists last(2, {3});
    for (int layer = 0; layer < 2; ++layer) {
      Edits away(layer);
      away.offload(last.pages());
      away.drop(Tier::device, last.pages());
      one(store, slot, away);
    }
    REQUIRE(f.fill(store, slot, 1, true) == Fit::ok);
    CHECK(on(store, Tier::device, 0, slot, 0, 3));
    CHECK_FALSE(on(store, Tier::host, 0, slot, 0, 3));  // outgrown
    check_tokens(f, store, 0, slot, 0, range(0, 15));
    check_tokens(f, store, 1, slot, 1, range(0, 15));
    check_summaries(store, 0, slot, 0);
  }
}

TEST_CASE("token state that was written above a lower copy goes down with the page") {
  for (const bool encoded : {false, true}) {
    StoreFixture f;
    f.options.token_state = {"age", "score"};
    if (encoded) f.options.host_codec.k.bits = f.options.host_codec.v.bits = 8;
    CpuStore store(f.options);
    const int slot = store.open();
    f.fill(store, slot, 10);
    Lists first(2, {0});
    Edits down, drop, up;
    down.offload(first.pages());
    drop.drop(Tier::device, first.pages());
    up.recall(first.pages());
    REQUIRE(one(store, slot, down).changed == 2);
    const std::vector<std::int32_t> slots{slot};
    const PagedKv kv = store.view(0, slots);
    for (int c = 0; c < 2; ++c)
      for (int t = 0; t < 4; ++t) {
        const PageEntry& e = kv.entry(0, 1, 0);
        const float x = static_cast<float>(10 * c + t);
        std::memcpy(kv.frame(e) + kv.layout(e).state + (c * 4 + t) * 4, &x, 4);
      }
    const std::int64_t moved = store.ledger().moved_total(Tier::host);
    REQUIRE(one(store, slot, drop).changed == 2);
    CHECK(store.ledger().moved_total(Tier::host) == moved + 2 * 2 * 4 * 4);  // heads, columns, tokens, bytes
    REQUIRE(one(store, slot, up).changed == 2);
    const auto tokens = test::stored_tokens(store, 0, slot, 1);
    for (int t = 0; t < 4; ++t)
      CHECK(tokens[static_cast<std::size_t>(t)].state == std::vector<float>{float(t), float(10 + t)});
    store.check_invariants();
  }
}

TEST_CASE("move exchanges tokens, also between tiers") {
  StoreFixture f;
  f.options.summary = Summary::min_max;
  f.options.token_state = {"score"};
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 12);
  Lists away(2, {0, 1});
  Edits lower;
  lower.offload(away.pages());
  Lists gone(2, {0});
  lower.drop(Tier::device, gone.pages());
  one(store, slot, lower);
  Lists pairs(2, {0, 11, 5, 6});
  Edits e;
  e.move(pairs.tokens());
  CHECK(one(store, slot, e).changed == 4);
  const auto tokens = test::stored_tokens(store, 0, slot, 1);
  CHECK(tokens[0].position == 11);
  CHECK(tokens[11].position == 0);
  CHECK(tokens[5].position == 6);
  CHECK(on(store, Tier::host, 0, slot, 0, 0));
  CHECK_FALSE(on(store, Tier::host, 0, slot, 0, 1));  // stale
  check_tokens(f, store, 0, slot, 0, range(0, 12));
  check_summaries(store, 0, slot, 0);
  Lists odd(2, {1});
  Edits bad;
  bad.move(odd.tokens());
  CHECK_THROWS_AS(one(store, slot, bad), Error);
}

TEST_CASE("encode to int8 and back stays within half a step; the ledger follows") {
  StoreFixture f;
  f.options.codecs = {CodecSpec{}, CodecSpec{{8}, {8}}};
  f.options.token_state = {"score"};
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 10);
  Lists pages(2, {0, 1}), partial(2, {2});
  const auto e = test::encode(pages.pages(), 1);
  CHECK(store.apply(e, {slot}).changed == 4);
  CHECK(store.apply(e, {slot}).changed == 0);
  CHECK(store.apply(test::encode(partial.pages(), 1), {slot}).changed == 0);
  store.check_invariants();
  const auto& held = store.ledger().held(Tier::device);
  CHECK(held[static_cast<int>(Tag::codec_metadata)] == 4 * 2 * 64);
  CHECK(held[static_cast<int>(Tag::keys)] == 8 * 4 * 8 * 4 + 4 * 64);  // 8 pages of f32, 4 of 32 bytes padded to 64
  const auto check = [&] {
    for (const auto& t : test::stored_tokens(store, 0, slot, 1))
      for (int d = 0; d < 8; ++d) {
        // Elements span at most 8, so a step is at most 8 / 255. The f16 metadata adds less than another step.
        CHECK(std::abs(t.k[static_cast<std::size_t>(d)] - f.element(0, 0, slot, 1, t.position, d)) < 8.f / 255);
        CHECK(std::abs(t.v[static_cast<std::size_t>(d)] - f.element(1, 0, slot, 1, t.position, d)) < 8.f / 255);
      }
    CHECK(store.positions(0, slot, 1) == range(0, 10));
  };
  check();
  REQUIRE(f.fill(store, slot, 1) == Fit::ok);  // the partial page has the first codec
  store.check_invariants();
  Lists last(PerHead{{10}, {10}});
  Edits out;
  out.evict(last.tokens());
  one(store, slot, out);
  CHECK(store.apply(test::encode(pages.pages(), 0), {slot}).changed == 4);
  CHECK(held[static_cast<int>(Tag::codec_metadata)] == 0);
  check();
  store.check_invariants();
  CHECK_THROWS_AS(store.apply(test::encode(pages.pages(), 2), {slot}), Error);
}

TEST_CASE("pages go from codes to other codes and back as copies of their tokens do") {
  StoreFixture f;
  f.options.shape.head_dim = 16;
  f.options.shape.dtype = DType::bf16;
  f.options.codecs = {CodecSpec{{8}, {4}}, CodecSpec{{4}, {2}}, CodecSpec{{8, CodeKind::e4m3}, {8}}};
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 10);
  // A page of its own keeps a token, and takes the same way.
  const auto layout = [&](int codec) { return ops::make_layout(DType::bf16, f.options.codecs[codec], 4, 16, 0); };
  const auto tokens = test::stored_tokens(store, 0, slot, 1);
  std::vector<std::byte> page(static_cast<std::size_t>(layout(0).bytes));
  ops::write_token(page.data(), layout(0), 2, f.row(0, 0, slot, 1, 2).data(), f.row(1, 0, slot, 1, 2).data(), 2);
  Lists pages(2, {0});
  const auto& held = store.ledger().held(Tier::device);
  int from = 0;
  for (const int to : {1, 2, 0, 2, 1}) {
    CAPTURE(from, to);
    std::vector<std::byte> next(static_cast<std::size_t>(layout(to).bytes));
    ops::copy_token(page.data(), layout(from), 2, next.data(), layout(to), 2);
    page = next;
    from = to;
    CHECK(store.apply(test::encode(pages.pages(), to), {slot}).changed == 2);
    store.check_invariants();
    const auto got = test::stored_tokens(store, 0, slot, 1);
    std::vector<float> row(16);
    for (const KvSide side : {KvSide::key, KvSide::value}) {
      ops::read_row(page.data(), layout(to), side, 2, row.data());
      CHECK(row == (side == KvSide::key ? got[2].k : got[2].v));
    }
    CHECK(got[7].k == tokens[7].k);
    const PageLayout first = layout(0), other = layout(to);
    CHECK(held[static_cast<int>(Tag::keys)] == 10 * (first.v - first.k) + 2 * (other.v - other.k));
    CHECK(held[static_cast<int>(Tag::values)] == 10 * (first.k_meta - first.v) + 2 * (other.k_meta - other.v));
  }
}

TEST_CASE("a host codec encodes on the way down and decodes on the way up") {
  StoreFixture f;
  f.options.host_codec = CodecSpec{{8}, {8}};
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 8);
  const PageLayout host = ops::make_layout(DType::f32, f.options.host_codec, 4, 8, 0);
  Lists pages(2, {0, 1});
  Edits e;
  e.offload(pages.pages());
  e.drop(Tier::device, pages.pages());
  one(store, slot, e);
  CHECK(store.ledger().total(Tier::host) == 4 * host.bytes);
  CHECK(store.ledger().moved_total(Tier::host) == 4 * host.bytes);
  Edits up;
  up.recall(pages.pages());
  one(store, slot, up);
  for (const auto& t : test::stored_tokens(store, 0, slot, 0))
    for (int d = 0; d < 8; ++d)
      CHECK(std::abs(t.k[static_cast<std::size_t>(d)] - f.element(0, 0, slot, 0, t.position, d)) < 8.f / 255);
  store.check_invariants();
}

TEST_CASE("pages on the host are packed without loss, and keep their tokens") {
  StoreFixture f;
  f.options.shape.dtype = DType::bf16;
  f.options.shape.head_dim = 64;
  f.options.shape.page_size = 8;
  f.inv_freq = test::test_inv_freq(64);
  f.options.host_codec.packs = true;
  f.options.summary = Summary::min_max;
  f.wild = true;
  CpuStore store(f.options), other(f.options);
  const int slot = store.open();
  f.fill(store, slot, 52);  // 6 full pages, of which 3 to 5 pack badly, and one with 4 tokens
  const auto before = test::stored_tokens(store, 0, slot, 0);
  const auto positions = store.positions(0, slot, 0);
  Lists pages(2, {0, 1, 2, 3, 4, 5, 6});
  Edits down;
  down.offload(pages.pages());
  down.drop(Tier::device, pages.pages());
  one(store, slot, down);
  const std::vector<std::int32_t> slots{slot};
  const PagedKv host = store.view(0, slots, Tier::host);
  std::int64_t crossed = 0;
  const std::int64_t plain = frame_layout(f.options, {}).bytes;
  for (int head = 0; head < 2; ++head)
    for (int page = 0; page < 7; ++page) {
      CAPTURE(page);
      CHECK((host.entry(0, head, page).packed > 0) == (page < 3));
      crossed += ops::packed_bytes(host.layout(host.entry(0, head, page)), host.entry(0, head, page));
    }
  CHECK(crossed < 14 * plain);
  CHECK(store.ledger().moved_total(Tier::host) == crossed);
  CHECK(store.ledger().total(Tier::host) == 14 * plain);  // the frames are whole
  CHECK(test::stored_tokens(store, 0, slot, 0) == before);
  CHECK(store.positions(0, slot, 0) == positions);
  store.check_invariants();

  const int copy = other.open();
  REQUIRE(other.restore(copy, store.save(slot)) == Fit::ok);
  other.check_invariants();
  Edits up;
  up.recall(pages.pages());
  for (auto [of, at] : {std::pair<CpuStore*, int>{&store, slot}, {&other, copy}}) {
    one(*of, at, up);
    CHECK(of->ledger().moved_total(Tier::device) == crossed);
    const std::vector<std::int32_t> one_slot{at};
    const PagedKv kv = of->view(0, one_slot);
    for (int page = 0; page < 7; ++page) CHECK(kv.entry(0, 0, page).packed == 0);
    CHECK(test::stored_tokens(*of, 0, at, 0) == before);
    f.fill(*of, at, 1, true);  // the last page goes on
    CHECK(of->length(0, at, 0) == 53);
    of->check_invariants();
  }
  for (const Edit::Verb verb : {Edit::evict, Edit::evict_rest, Edit::move}) {
    Edits e;
    const Lists tokens(2, {0, 1});
    if (verb == Edit::move)
      e.move(tokens.tokens());
    else
      verb == Edit::evict ? e.evict(tokens.tokens()) : e.evict_rest(tokens.tokens());
    CHECK_THROWS_WITH(store.apply(e.all(), {slot}), Catch::Contains("packs pages"));
  }
  CHECK(test::stored_tokens(store, 0, slot, 0).size() == 53);

  const auto refused = [&](const auto& change, const char* what) {
    StoreOptions o = f.options;
    change(o);
    CHECK_THROWS_WITH(check_store(o, Device::cpu), Catch::Contains(what));
  };
  refused([](StoreOptions& o) { o.codecs[0].packs = true; }, "placement");
  refused([](StoreOptions& o) { o.shape.dtype = DType::f32; }, "bf16");
  refused([](StoreOptions& o) { o.codecs[0].k.bits = 8; }, "codes");
  refused([](StoreOptions& o) { o.token_state = {"score"}; }, "token state");
  refused([](StoreOptions& o) { o.copy_by_host = true; }, "several codecs");
}

TEST_CASE("an edit of n steps from now takes effect exactly then, from lists of its own, per row") {
  StoreFixture f;
  CpuStore store(f.options);
  const int a = store.open(), b = store.open();
  f.fill(store, a, 6);
  f.fill(store, b, 6);
  f.fill(store, b, 1, true);                                       // b's clock is ahead: rows wait on their own
  std::vector<std::int32_t> index{2, 3, 4, 5}, count{1, 1, 1, 1};  // [row, head, 1]
  TokenList list;
  list.index = View<std::int32_t, 3>::dense(index.data(), {2, 2, 1});
  list.count = View<std::int32_t, 2>::dense(count.data(), {2, 2});
  Edits e;
  e.evict(list, Deadline::in_steps(2));
  CHECK(store.apply(e.all(), {a, b}).changed == 0);
  index.assign(4, -5);
  count.assign(4, 9);
  f.fill(store, a, 1, true);
  CHECK(store.length(0, a, 0) == 7);
  f.fill(store, a, 3);  // a prompt chunk is no decode step
  CHECK(store.length(0, a, 0) == 10);
  const std::int64_t fired = store.fired();
  f.fill(store, a, 1, true);
  CHECK(store.length(0, a, 0) == 10);
  CHECK(store.fired() == fired + 1);
  CHECK(store.positions(0, a, 0) == std::vector<std::int32_t>{0, 1, 3, 4, 5, 6, 7, 8, 9, 10});
  CHECK(store.positions(0, a, 1)[3] == 4);
  CHECK(store.length(1, a, 0) == 11);
  CHECK(store.length(0, b, 0) == 7);
  f.fill(store, b, 1, true);
  f.fill(store, b, 1, true);
  CHECK(store.length(0, b, 0) == 8);
  CHECK(store.positions(0, b, 0)[4] == 5);  // token 4 left
  store.check_invariants();
  f.fill(store, b, 1, true);
  CHECK(store.length(0, b, 0) == 9);  // the edit acts once
}

TEST_CASE("an edit for the next step waits until this one, or this chunk of the prompt, has ended") {
  for (const bool decode : {false, true}) {
    CAPTURE(decode);
    StoreFixture f;
    CpuStore store(f.options);
    const int slot = store.open();
    f.fill(store, slot, 6);
    Lists l(2, {1});
    Edits e;
    e.evict(l.tokens(), {Deadline::next_step});
    CHECK(one(store, slot, e).changed == 0);
    l.scribble();
    CHECK(store.length(0, slot, 0) == 6);
    f.fill(store, slot, 1, decode);
    CHECK(store.positions(0, slot, 0) == std::vector<std::int32_t>{0, 2, 3, 4, 5, 6});
    f.fill(store, slot, 1, decode);
    CHECK(store.length(0, slot, 0) == 7);  // once only
    store.check_invariants();
  }
}

TEST_CASE("edits wait no longer than their sequence") {
  StoreFixture f;
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 6);
  Lists l(2, {0});
  Edits e;
  e.evict(l.tokens(), Deadline::in_steps(1));
  one(store, slot, e);
  store.close(slot);
  REQUIRE(store.open() == slot);
  f.fill(store, slot, 6);
  f.fill(store, slot, 1, true);
  CHECK(store.length(0, slot, 0) == 7);
}

TEST_CASE("lists that are wrong are refused before anything is read beyond them") {
  StoreFixture f;
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 6);
  const auto refused = [&](Edits& e) {
    CHECK_THROWS_AS(one(store, slot, e), Error);
    store.check_invariants();
  };
  Lists outside(2, {6}), negative(2, {-1}), descending(2, {3, 2}), twice(2, {1, 1}), page(2, {2}), fine(2, {0});
  for (Lists* l : {&outside, &negative, &descending, &twice}) {
    Edits a, b;
    a.evict(l->tokens());
    refused(a);
    b.evict_rest(l->tokens());
    refused(b);
  }
  Edits e;
  e.offload(page.pages());
  refused(e);
  Edits layer(2);
  layer.evict(fine.tokens());
  refused(layer);
  Edits disk;
  disk.drop(Tier::disk, fine.pages());
  refused(disk);
  Lists one_head(PerHead{{0}});
  Edits narrow;
  narrow.evict(one_head.tokens());
  refused(narrow);
  Lists overrun(2, {0});
  overrun.scribble();
  Edits count, later;
  count.evict(overrun.tokens());
  refused(count);
  later.evict(overrun.tokens(), Deadline::in_steps(1));
  refused(later);
  CHECK(store.length(0, slot, 0) == 6);
}

TEST_CASE("an attend list gets its pins, ascending and without repeats") {
  StoreFixture f;
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 26);  // 7 pages, the last with 2 tokens
  const auto pages = [&](const std::vector<std::int32_t>& list, Pins pins) {
    Lists l(2, list);
    Edits e;
    e.attend(l.pages(), pins);
    const IndexList out = store.resolve_attend(e.all()[0], {slot}, store.workspace());
    std::vector<std::int32_t> got;
    for (int i = 0; i < out.count(0, 1); ++i) got.push_back(out.index(0, 1, i));
    return got;
  };
  using V = std::vector<std::int32_t>;
  CHECK(pages({2, 4}, {}) == V{2, 4});
  CHECK(pages({2, 4}, {.first = 1}) == V{0, 2, 4});
  CHECK(pages({2, 4}, {.first = 5}) == V{0, 1, 2, 4});
  CHECK(pages({2, 4}, {.last = 2}) == V{2, 4, 6});
  CHECK(pages({2, 4}, {.last = 3}) == V{2, 4, 5, 6});
  CHECK(pages({2, 4}, {.newest_page = true}) == V{2, 4, 6});
  CHECK(pages({6}, {.last = 1, .newest_page = true}) == V{6});
  CHECK(pages({}, {.first = 99, .last = 99}) == V{0, 1, 2, 3, 4, 5, 6});
  CHECK_THROWS_AS(pages({7}, {}), Error);
  CHECK_THROWS_AS(pages({-1}, {}), Error);
}

TEST_CASE("an attend list of tokens gets its pins, ascending and without repeats") {
  StoreFixture f;
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 10);  // pages of 4: the newest one has tokens 8 and 9
  const auto tokens = [&](const std::vector<std::int32_t>& list, Pins pins) {
    Lists l(2, list);
    Edits e;
    e.attend(l.tokens(), pins);
    const IndexList out = store.resolve_attend(e.all()[0], {slot}, store.workspace());
    std::vector<std::int32_t> got;
    for (int i = 0; i < out.count(0, 1); ++i) got.push_back(out.index(0, 1, i));
    return got;
  };
  using V = std::vector<std::int32_t>;
  CHECK(tokens({2, 5}, {}) == V{2, 5});
  CHECK(tokens({}, {}) == V{});
  CHECK(tokens({2, 5}, {.first = 1}) == V{0, 2, 5});
  CHECK(tokens({2, 5}, {.first = 3}) == V{0, 1, 2, 5});
  CHECK(tokens({2, 9}, {.last = 2}) == V{2, 8, 9});
  CHECK(tokens({2, 5}, {.newest_page = true}) == V{2, 5, 8, 9});
  CHECK(tokens({2}, {.last = 3, .newest_page = true}) == V{2, 7, 8, 9});
  CHECK(store.fired() == 7);
  CHECK(tokens({4}, {.first = 99}) == V{0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
  CHECK(store.fired() == 7);
  CHECK_THROWS_WITH(tokens({10}, {}), Catch::Contains("token 10"));
  CHECK_THROWS_AS(tokens({-1}, {}), Error);
}
