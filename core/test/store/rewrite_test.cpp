// Edits::rewrite changes keys or values in place.
#include <kvlab/error.hpp>
#include <kvlab/policy.hpp>

#include <algorithm>
#include <catch2/catch.hpp>
#include <limits>

#include "support/store_fixture.hpp"

using namespace kvlab;
using test::Lists;
using test::StoreFixture;

namespace {

using Tokens = std::vector<test::StoredToken>;

struct Rewritten : StoreFixture {
  Rewritten() {
    options.functional = true;
    options.token_state = {"score"};
  }
  // Rows of one slot: those of the fixture with this function applied to each element.
  template <class F>
  std::vector<float> rows(int side, int layer, int slot, int tokens, const F& f) const {
    std::vector<float> out;
    for (int h = 0; h < options.shape.kv_heads; ++h)
      for (int t = 0; t < tokens; ++t)
        for (const float x : row(side, layer, slot, h, t)) out.push_back(f(x));
    return out;
  }
};

Applied rewrite(Store& store, int slot, KvSide side, std::vector<float>& rows, int tokens, int layer = 0) {
  const Shape& s = store.shape();
  Edits edits(layer);
  edits.rewrite(side, View<const float, 4>::dense(rows.data(), {1, s.kv_heads, tokens, s.head_dim}));
  return store.apply(edits.all(), {slot});
}

float doubled(float x) { return 2 * x; }
float same(float x) { return x; }

}  // namespace

TEST_CASE("a rewrite changes one side of one layer and slot, and nothing else") {
  const Rewritten f;
  CpuStore store(f.options);
  const int slot = store.open(), other = store.open();
  f.fill(store, slot, 10);
  f.fill(store, other, 7);
  const auto all = [&] {
    std::vector<Tokens> out;
    for (const int layer : {0, 1})
      for (const int of : {slot, other})
        for (const int head : {0, 1}) out.push_back(test::stored_tokens(store, layer, of, head));
    return out;
  };
  const auto bytes = store.page_bytes(Tier::device);
  for (const KvSide side : {KvSide::key, KvSide::value}) {
    const auto before = all();
    auto rows = f.rows(side == KvSide::key ? 0 : 1, 1, slot, 10, doubled);
    CHECK(rewrite(store, slot, side, rows, 10, 1).changed > 0);
    auto wanted = before;
    for (const std::size_t head : {std::size_t{4}, std::size_t{5}})  // layer 1, slot
      for (auto& token : wanted[head])
        for (float& x : side == KvSide::key ? token.k : token.v) x *= 2;
    CHECK(all() == wanted);
  }
  CHECK(store.fired() == 2);
  CHECK(store.page_bytes(Tier::device) == bytes);
  CHECK(store.ledger().moved_total(Tier::device) == 0);
  store.check_invariants();
}

TEST_CASE("a rewrite of what is there does not count, and one of a single element does") {
  const Rewritten f;
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 10);
  auto rows = f.rows(0, 0, slot, 10, same);
  CHECK(rewrite(store, slot, KvSide::key, rows, 10).changed == 0);
  CHECK(store.fired() == 0);
  rows.back() += 1;
  CHECK(rewrite(store, slot, KvSide::key, rows, 10).changed == 1);
  CHECK(store.fired() == 1);
}

TEST_CASE("a rewrite is stored in the cache's dtype") {
  Rewritten f;
  f.options.shape.dtype = DType::bf16;
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 5);
  auto rows = f.rows(1, 0, slot, 5, [](float) { return 1.00390625f; });  // half way between 1 and the next in bf16
  rewrite(store, slot, KvSide::value, rows, 5);
  const Tokens tokens = test::stored_tokens(store, 0, slot, 1);
  for (const float x : tokens[4].v) CHECK(x == 1);  // ties go to even
}

TEST_CASE("summaries follow a rewrite") {
  Rewritten f;
  f.options.summary = GENERATE(Summary::min_max, Summary::mean, Summary::centre_radius);
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 10);
  auto rows = f.rows(0, 0, slot, 10, [](float x) { return 3 - x; });
  rewrite(store, slot, KvSide::key, rows, 10);
  // A store that got these keys by an append.
  CpuStore fresh(f.options);
  REQUIRE(fresh.open() == slot);
  const auto dim = static_cast<std::size_t>(f.options.shape.head_dim);
  std::vector<float> k;
  for (std::size_t t = 0; t < 10; ++t)
    for (std::size_t h = 0; h < 2; ++h)
      for (std::size_t d = 0; d < dim; ++d) k.push_back(rows[(h * 10 + t) * dim + d]);
  REQUIRE(fresh.append(0, slot, k.data(), k.data(), 10, 0) == Fit::ok);
  const Summaries got = store.summaries(0), wanted = fresh.summaries(0);
  for (const int head : {0, 1})
    for (const int page : {0, 1, 2})
      CHECK(std::memcmp(got.at(slot, head, page), wanted.at(slot, head, page),
                        static_cast<std::size_t>(got.page_stride)) == 0);
}

TEST_CASE("a rewrite frees the copies on the host that it makes stale, and wants every page on the device") {
  Rewritten f;
  f.options.host_pages = true;
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 8);
  const Lists pages(2, {0, 1}), none(2, {});
  const auto edit = [&](const auto& fill) {
    Edits edits;
    fill(edits);
    return store.apply(edits.all(), {slot});
  };
  edit([&](Edits& e) { e.offload(pages.pages()); });
  REQUIRE(test::on(store, Tier::host, 0, slot, 0, 1));
  auto rows = f.rows(0, 0, slot, 8, same);
  rows[0] += 1;  // of head 0, page 0
  rewrite(store, slot, KvSide::key, rows, 8);
  CHECK_FALSE(test::on(store, Tier::host, 0, slot, 0, 0));
  CHECK(test::on(store, Tier::host, 0, slot, 0, 1));
  CHECK(test::on(store, Tier::host, 0, slot, 1, 0));
  store.check_invariants();
  edit([&](Edits& e) { e.offload(pages.pages()); });
  edit([&](Edits& e) { e.drop(Tier::device, pages.pages()); });
  CHECK_THROWS_WITH(rewrite(store, slot, KvSide::key, rows, 8),
                    Catch::Contains("got a rewrite with page 0 on the host, wanted every page on the device"));
}

namespace {

// The same range of each head.
struct Range {
  std::vector<std::int32_t> first, count;
  TokenRange of;
  Range(std::int32_t from, std::int32_t n, std::int64_t heads = 2)
      : first(static_cast<std::size_t>(heads), from), count(static_cast<std::size_t>(heads), n) {
    of.first = View<const std::int32_t, 2>::dense(first.data(), {1, heads});
    of.count = View<const std::int32_t, 2>::dense(count.data(), {1, heads});
  }
};

Applied rewrite(Store& store, int slot, KvSide side, std::vector<float>& rows, int room, const TokenRange& range) {
  const Shape& s = store.shape();
  Edits edits(0);
  edits.rewrite(side, View<const float, 4>::dense(rows.data(), {1, s.kv_heads, room, s.head_dim}), range);
  return store.apply(edits.all(), {slot});
}

}  // namespace

TEST_CASE("a rewrite of a range changes its rows and neither reads nor writes others") {
  Rewritten f;
  f.options.host_pages = true;
  f.options.summary = Summary::min_max;
  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 18);
  const auto edit = [&](const auto& fill) {
    Edits edits;
    fill(edits);
    return store.apply(edits.all(), {slot});
  };
  // Pages 0 and 3 are on the host alone, and page 1 on both tiers.
  const Lists some(2, {0, 1, 3}), away(2, {0, 3});
  edit([&](Edits& e) { e.offload(some.pages()); });
  edit([&](Edits& e) { e.drop(Tier::device, away.pages()); });
  const auto before =
      std::vector<Tokens>{test::stored_tokens(store, 0, slot, 0), test::stored_tokens(store, 0, slot, 1)};
  constexpr int room = 5;
  std::vector<float> rows(2 * room * 8, std::numeric_limits<float>::quiet_NaN());  // the room behind the range is NaN
  for (std::size_t h = 0; h < 2; ++h)
    for (std::size_t i = 0; i < 4 * 8; ++i) rows[h * room * 8 + i] = static_cast<float>(100 * h + i);
  const Range range(6, 4);  // the end of page 1 and the beginning of page 2
  CHECK(rewrite(store, slot, KvSide::key, rows, room, range.of).changed == 8);
  for (const int head : {0, 1}) {
    Tokens wanted = before[static_cast<std::size_t>(head)];
    for (std::size_t i = 0; i < 4; ++i)
      for (std::size_t d = 0; d < 8; ++d)
        wanted[6 + i].k[d] = static_cast<float>(100 * static_cast<std::size_t>(head) + i * 8 + d);
    CHECK(test::stored_tokens(store, 0, slot, head) == wanted);
    CHECK(test::on(store, Tier::host, 0, slot, head, 0));
    CHECK_FALSE(test::on(store, Tier::host, 0, slot, head, 1));
    const auto* least = reinterpret_cast<const float*>(store.summaries(0).at(slot, head, 1));
    for (std::size_t d = 0; d < 8; ++d) {  // of page 1: two tokens that stay, and two of the range
      float wanted_least = wanted[4].k[d];
      for (const std::size_t t : {5, 6, 7}) wanted_least = std::min(wanted_least, wanted[t].k[d]);
      CHECK(least[d] == wanted_least);
    }
  }
  store.check_invariants();
  CHECK(rewrite(store, slot, KvSide::key, rows, room, range.of).changed == 0);
  CHECK(rewrite(store, slot, KvSide::key, rows, room, Range(18, 0).of).changed == 0);
  CHECK(rewrite(store, slot, KvSide::key, rows, 0, Range(0, 0).of).changed == 0);
  using Catch::Contains;
  const auto refused = [&](int first, int count, const char* why) {
    CHECK_THROWS_WITH(rewrite(store, slot, KvSide::value, rows, room, Range(first, count).of), Contains(why));
  };
  refused(2, 3, "got a rewrite with page 0 on the host");
  refused(15, 4, "got a range of 4 tokens from place 15, wanted places below 18");
  refused(4, 6, "and at most 5, the tokens of the rows");
  refused(-1, 2, "got a range of 2 tokens from place -1");
  CHECK_THROWS_WITH(rewrite(store, slot, KvSide::key, rows, room, Range(4, 2, 1).of),
                    Contains("got a range of fewer rows or heads"));
}

TEST_CASE("a rewrite needs the declaration, rows of the whole shape, and pages without codes") {
  Rewritten f;
  const auto refused = [&](StoreOptions o) {
    try {
      check_store(o, Device::cpu);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  CHECK(refused(f.options).empty());
  StoreOptions codes = f.options;
  codes.codecs = {CodecSpec{}, CodecSpec{{4}, {4}}};
  CHECK_THAT(refused(codes), Catch::Contains("got Needs::functional with a codec that stores codes"));
  StoreOptions by_rank = f.options;
  by_rank.rope = RopeRegime::cache_relative;
  CHECK_THAT(refused(by_rank), Catch::Contains("got Needs::functional with another RoPE regime, wanted original"));
  StoreOptions archiving = f.options;
  archiving.summary = Summary::none;
  archiving.archive = true;
  CHECK_THAT(refused(archiving), Catch::Contains("got Needs::functional with Needs::archive"));

  CpuStore store(f.options);
  const int slot = store.open();
  f.fill(store, slot, 10);
  auto rows = f.rows(0, 0, slot, 10, same);
  CHECK_THROWS_WITH(rewrite(store, slot, KvSide::key, rows, 9), Catch::Contains("got rows of another shape"));
  f.options.functional = false;
  CpuStore plain(f.options);
  REQUIRE(plain.open() == slot);
  f.fill(plain, slot, 10);
  CHECK_THROWS_WITH(rewrite(plain, slot, KvSide::key, rows, 10),
                    Catch::Contains("got a rewrite from a policy without Needs::functional"));
}
