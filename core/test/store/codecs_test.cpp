// A cache of two codecs: encode, store_as, and edits of all layers.
#include <catch2/catch.hpp>
#include <kvlab/ops.hpp>
#include <random>

#include "ops/page/paged.hpp"
#include "support/store_fixture.hpp"

using namespace kvlab;
using test::Lists;
using test::PerHead;
using test::StoreFixture;

namespace {

constexpr CodecSpec high{{8}, {4}}, low{{4}, {2}};

StoreFixture two_codecs() {
  StoreFixture f;
  f.options.shape.head_dim = 16;
  f.options.shape.dtype = DType::bf16;
  f.options.codecs = {high, low};
  f.options.token_state = {"score"};
  f.options.all_layers = true;
  return f;
}

// Levels [row, kv_head, token] of one row.
struct RowLevels {
  std::vector<std::uint8_t> numbers;
  Levels of_heads;
  explicit RowLevels(const std::vector<std::vector<std::uint8_t>>& heads) {
    for (const auto& head : heads) numbers.insert(numbers.end(), head.begin(), head.end());
    const auto n = static_cast<std::int64_t>(heads[0].size());
    of_heads = Levels::dense(numbers.data(), {1, static_cast<std::int64_t>(heads.size()), n});
  }
};

// A token's row after it was stored by one codec and copied to others.
std::vector<float> stored(const StoreFixture& f, int side, int slot, int head, int position,
                          const std::vector<CodecSpec>& way) {
  const Shape& s = f.options.shape;
  const auto layout = [&](const CodecSpec& c) { return ops::make_layout(s.dtype, c, s.page_size, s.head_dim, 1); };
  std::vector<std::byte> page(static_cast<std::size_t>(layout(way[0]).bytes));
  ops::write_token(page.data(), layout(way[0]), 0, f.row(0, 0, slot, head, position).data(),
                   f.row(1, 0, slot, head, position).data(), position);
  for (std::size_t i = 1; i < way.size(); ++i) {
    std::vector<std::byte> next(static_cast<std::size_t>(layout(way[i]).bytes));
    ops::copy_token(page.data(), layout(way[i - 1]), 0, next.data(), layout(way[i]), 0);
    page = next;
  }
  std::vector<float> out(static_cast<std::size_t>(s.head_dim));
  ops::read_row(page.data(), layout(way.back()), side ? KvSide::value : KvSide::key, 0, out.data());
  return out;
}

std::vector<std::int32_t> places(const Store& store, int layer, int slot, int head) {
  return store.positions_by_place(layer, slot, head);
}

int lower_pages(const Store& store, int layer, int slot, int head) {
  return store.view(layer, {slot}).lower_pages(slot, head);
}

}  // namespace

TEST_CASE("codes become codes of fewer bits as the formula says") {
  // The scale of codes 0 to 255 is 1/8: f16 holds it, and 17 / 8.
  const int dim = 256;
  const auto layout = [&](int bits) {
    const CodecSide side{static_cast<std::uint8_t>(bits)};
    return ops::make_layout(DType::f32, {side, side}, 4, dim, 0);
  };
  std::vector<float> x(dim), y(dim);
  for (int i = 0; i < dim; ++i) x[static_cast<std::size_t>(i)] = static_cast<float>(i) / 8 - 3;
  std::vector<std::byte> eight(static_cast<std::size_t>(layout(8).bytes)), four(eight), two(eight);
  ops::write_token(eight.data(), layout(8), 1, x.data(), x.data(), 7);
  ops::copy_token(eight.data(), layout(8), 1, four.data(), layout(4), 2);
  ops::read_row(four.data(), layout(4), KvSide::key, 2, y.data());
  for (const auto& [code, wanted] : {std::pair{8, 0}, {9, 1}, {25, 1}, {26, 2}, {255, 15}})
    CHECK(y[static_cast<std::size_t>(code)] == static_cast<float>(wanted) * 17 / 8 - 3);
  ops::copy_token(four.data(), layout(4), 2, two.data(), layout(2), 0);
  ops::read_row(two.data(), layout(2), KvSide::value, 0, y.data());
  // The codes of four bits of 0, 3 * 17, 7 * 17, 8 * 17 and 15 * 17 are these numbers over 17.
  for (const auto& [code, wanted] : {std::pair{0, 0}, {3 * 17, 1}, {7 * 17, 1}, {8 * 17, 2}, {255, 3}})
    CHECK(y[static_cast<std::size_t>(code)] == static_cast<float>(wanted) * 85 / 8 - 3);
}

TEST_CASE("store_as puts whole pages of low tokens first, and drops what is gone") {
  StoreFixture f = two_codecs();  // pages of 4 tokens
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 11);
  const RowLevels levels(
      {{1, 1, 0, level_gone, 1, 0, 1, 1, 1, 0, 0}, {0, 0, 0, 0, 0, 0, 0, 0, level_gone, level_gone, 0}});
  Edits e;
  e.store_as(levels.of_heads);
  REQUIRE(store.apply(e.all(), {slot}).fit == Fit::ok);
  store.check_invariants();
  // Six low tokens fill one page. The two others stay high, in their order.
  CHECK(places(store, 0, slot, 0) == std::vector<std::int32_t>{0, 1, 4, 6, 2, 5, 7, 8, 9, 10});
  CHECK(lower_pages(store, 0, slot, 0) == 1);
  CHECK(places(store, 0, slot, 1) == std::vector<std::int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 10});
  CHECK(lower_pages(store, 0, slot, 1) == 0);
  CHECK(lower_pages(store, 1, slot, 0) == 0);
  const auto tokens = test::stored_tokens(store, 0, slot, 0);
  for (const auto& t : tokens) {
    const bool is_low = t.position == 0 || t.position == 1 || t.position == 4 || t.position == 6;
    const auto way = is_low ? std::vector<CodecSpec>{high, low} : std::vector<CodecSpec>{high};
    CHECK(t.k == stored(f, 0, slot, 0, t.position, way));
    CHECK(t.v == stored(f, 1, slot, 0, t.position, way));
  }
  const auto& held = store.ledger().held(Tier::device);
  const auto layout = [&](const CodecSpec& c) { return ops::make_layout(DType::bf16, c, 4, 16, 1); };
  const std::int64_t high_keys = layout(high).v - layout(high).k, low_keys = layout(low).v - layout(low).k;
  CHECK(held[static_cast<int>(Tag::keys)] == low_keys + (2 + 3 + 2 * 3) * high_keys);

  SECTION("a cache that already is so does not change") {
    const RowLevels again({{1, 1, 1, 1, 0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0, 0, 0, 0, 0}});
    Edits same;
    same.store_as(again.of_heads);
    CHECK(store.apply(same.all(), {slot}).changed == 0);
  }
  SECTION("appended tokens are high, and a token that moves takes the codec of its page") {
    REQUIRE(f.fill(store, slot, 2) == Fit::ok);
    store.check_invariants();
    Lists pair(PerHead{{2, 7}, {}});
    Edits move;
    move.move(pair.tokens());
    REQUIRE(store.apply(move.all(), {slot}).changed == 1);
    store.check_invariants();
    CHECK(places(store, 0, slot, 0)[2] == 8);
    for (const auto& t : test::stored_tokens(store, 0, slot, 0)) {
      if (t.position == 8) CHECK(t.k == stored(f, 0, slot, 0, 8, {high, low}));
      if (t.position == 4) CHECK(t.k == stored(f, 0, slot, 0, 4, {high, low, high}));
    }
  }
  SECTION("a snapshot keeps the codecs") {
    const int other = store.open();
    REQUIRE(store.restore(other, store.save(slot)) == Fit::ok);
    store.check_invariants();
    CHECK(lower_pages(store, 0, other, 0) == 1);
    CHECK(places(store, 0, other, 0) == places(store, 0, slot, 0));
  }
  SECTION("all may leave") {
    const RowLevels none({std::vector<std::uint8_t>(10, level_gone), std::vector<std::uint8_t>(10, level_gone)});
    Edits out;
    out.store_as(none.of_heads);
    REQUIRE(store.apply(out.all(), {slot}).fit == Fit::ok);
    store.check_invariants();
    CHECK(store.length(0, slot, 0) == 0);
    CHECK(lower_pages(store, 0, slot, 0) == 0);
  }
}

TEST_CASE("encode brings a page to the end of those that have its codec") {
  StoreFixture f = two_codecs();
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 14);
  Lists pages(2, {1, 2});
  REQUIRE(store.apply(test::encode(pages.pages(), 1), {slot}).changed == 4);
  store.check_invariants();
  CHECK(places(store, 0, slot, 0) == std::vector<std::int32_t>{4, 5, 6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 12, 13});
  Lists first(2, {0});
  REQUIRE(store.apply(test::encode(first.pages(), 0), {slot}).changed == 2);
  store.check_invariants();
  CHECK(places(store, 0, slot, 0) == std::vector<std::int32_t>{8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13});
  CHECK(lower_pages(store, 0, slot, 0) == 1);
}

TEST_CASE("one edit works on all layers") {
  StoreFixture f = two_codecs();
  CpuStore store(f.options);
  const int slot = store.open(), other = store.open();
  f.fill(store, slot, 9);
  f.fill(store, other, 9);
  const PagedKv all = store.view_all({other});
  REQUIRE(all.rows == 2);  // layers
  CHECK(all.tokens(1, 0) == 9);
  // Rows are layers: token 3 of layer 0 and head 0, token 8 of layer 1 and head 1.
  Lists of_heads(PerHead{{3}, {}, {}, {8}});
  TokenList out = of_heads.tokens();
  out.index = View<std::int32_t, 3>::dense(out.index.data, {2, 2, 1});
  out.count = View<std::int32_t, 2>::dense(out.count.data, {2, 2});
  Edits e;
  e.for_all_layers();
  e.evict(out);
  REQUIRE(store.apply(e.all(), {other}).fit == Fit::ok);
  store.check_invariants();
  CHECK(store.length(0, other, 0) == 8);
  CHECK(store.length(1, other, 0) == 9);
  CHECK(store.length(1, other, 1) == 8);
  CHECK(store.length(0, slot, 0) == 9);
  CHECK(places(store, 0, other, 0) == std::vector<std::int32_t>{0, 1, 2, 8, 4, 5, 6, 7});
  Edits later;
  later.for_all_layers();
  later.evict(out, {Deadline::next_step});
  CHECK_THROWS_AS(store.apply(later.all(), {other}), Error);
}

// A page that comes back would have the first codec, in the place of one that has the second.
TEST_CASE("two codecs do not go with pages on the host") {
  StoreFixture f = two_codecs();
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 9);
  Lists pages(2, {0});
  Edits down;
  down.offload(pages.pages());
  CHECK_THROWS_WITH(store.apply(down.all(), {slot}), Catch::Contains("got an offload from a policy with two codecs"));
}

TEST_CASE("wrong levels are refused") {
  StoreFixture f = two_codecs();
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 4);
  Edits e;
  SECTION("a codec that is not there") {
    const RowLevels bad({{0, 2, 0, 0}, {0, 0, 0, 0}});
    e.store_as(bad.of_heads);
    CHECK_THROWS_AS(store.apply(e.all(), {slot}), Error);
  }
  SECTION("too few") {
    const RowLevels few({{0, 0}, {0, 0}});
    e.store_as(few.of_heads);
    CHECK_THROWS_AS(store.apply(e.all(), {slot}), Error);
  }
  SECTION("more codecs than two") {
    StoreOptions o = f.options;
    o.codecs.push_back(high);
    CHECK_THROWS_WITH(check_store(o, Device::cpu),
                      Catch::Contains("got a policy with 3 codecs, wanted one or two: one number a head says which"));
  }
}

TEST_CASE("pages of a grouped codec keep their tokens") {
  StoreFixture f = two_codecs();
  const CodecSide keys{4, CodeKind::integer, CodeAxis::channel, 0}, values{4, CodeKind::integer, CodeAxis::token, 8};
  f.options.codecs = {{}, {keys, values}};
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 14);
  const std::vector<std::int32_t> slots{slot};
  Lists aged(2, {0, 0});
  const auto age = [&](int residual) {
    ops::aged_pages(store.view(0, slots), {}, residual, aged.pages(), Stream::cpu());
    return std::vector<std::int32_t>(&aged.pages().index(0, 0, 0),
                                     &aged.pages().index(0, 0, 0) + aged.pages().count(0, 0));
  };
  CHECK(age(11).empty());  // pages of 4 tokens
  CHECK(age(10) == std::vector<std::int32_t>{0});
  CHECK(age(2) == std::vector<std::int32_t>{0, 1});  // the list has room for two
  REQUIRE(store.apply(test::encode(aged.pages(), 1), {slot}).changed == 4);
  store.check_invariants();
  CHECK(lower_pages(store, 0, slot, 0) == 2);
  CHECK(age(2) == std::vector<std::int32_t>{2});
  CHECK(age(3).empty());
  for (int t = 0; t < 14; ++t) CHECK(places(store, 0, slot, 0)[static_cast<std::size_t>(t)] == t);
  Edits edits;
  Lists out(2, {13});
  edits.evict(out.tokens());
  CHECK_THROWS_WITH(store.apply(edits.all(), slots), Catch::Contains("such pages keep their tokens"));
  store.check_invariants();
}
