// The RoPE regimes of stored keys.
#include <catch2/catch.hpp>
#include <random>

#include "support/store_fixture.hpp"

using namespace kvlab;
using test::Lists;
using test::StoreFixture;

namespace {

// Keys as attention reads them, in text order.
std::vector<std::pair<std::int32_t, std::vector<float>>> seen_keys(const Store& store, int slot) {
  const std::vector<std::int32_t> slots{slot};
  const PagedKv kv = store.view(0, slots);
  const int n = kv.tokens(0, 0), dim = kv.head_dim;
  std::vector<float> rows(static_cast<std::size_t>(n * dim));
  ops::gather_rows(kv, 0, 0, KvSide::key, n, rows.data());
  std::vector<std::int32_t> position(static_cast<std::size_t>(n));
  ops::token_positions(kv, 0, 0, n, position.data());
  std::vector<std::pair<std::int32_t, std::vector<float>>> out;
  for (int t = 0; t < n; ++t)
    out.emplace_back(position[static_cast<std::size_t>(t)],
                     std::vector<float>(rows.begin() + t * dim, rows.begin() + (t + 1) * dim));
  std::sort(out.begin(), out.end());
  return out;
}

// One layer and one head. The fixture makes the keys before RoPE.
struct Regime {
  StoreFixture f;
  std::unique_ptr<CpuStore> store;
  int slot = 0;

  explicit Regime(RopeRegime rope) {
    f.options.shape.layers = 1;
    f.options.shape.kv_heads = 1;
    f.options.rope = rope;
    f.options.rope_table = {f.inv_freq.data(), 8, 1.f};
    f.options.summary = Summary::min_max;
    store = std::make_unique<CpuStore>(f.options);
    slot = store->open();
  }
  void add() {
    const int at = store->position(slot);
    auto k = f.row(0, 0, 0, 0, at), v = f.row(1, 0, 0, 0, at);
    if (f.options.rope == RopeRegime::re_rotate) ops::rotate(k.data(), f.options.rope_table, store->length(0, slot, 0));
    REQUIRE(store->append(0, slot, k.data(), v.data(), 1, at) == Fit::ok);
    store->advance(slot, 1, true);
  }
  void apply(const Edits& e) { REQUIRE(store->apply(e.all(), {slot}).fit == Fit::ok); }
};

}  // namespace

TEST_CASE("re-rotated keys are those that cache-relative reading gives, whatever leaves") {
  Regime a(RopeRegime::cache_relative), b(RopeRegime::re_rotate);
  std::mt19937 rng(3);
  for (int round = 0; round < 40; ++round) {
    a.add(), b.add();
    const int n = a.store->length(0, a.slot, 0);
    REQUIRE(b.store->length(0, b.slot, 0) == n);
    if (round % 3 != 2) continue;
    std::vector<std::int32_t> gone;
    for (int t = 0; t < n; ++t)
      if (rng() % (round % 2 ? 4 : 9) == 0) gone.push_back(t);
    for (Regime* r : {&a, &b}) {
      const Lists l(1, gone);
      Edits e;
      e.evict(l.tokens());
      r->apply(e);
      r->store->check_invariants();
    }
    const auto x = seen_keys(*a.store, a.slot), y = seen_keys(*b.store, b.slot);
    REQUIRE(x.size() == y.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      REQUIRE(x[i].first == y[i].first);
      auto direct = a.f.row(0, 0, 0, 0, x[i].first);  // the definition: a key is rotated by its rank
      ops::rotate(direct.data(), a.f.options.rope_table, static_cast<double>(i));
      for (std::size_t d = 0; d < direct.size(); ++d) {
        CHECK(std::abs(x[i].second[d] - direct[d]) < 1e-4f);
        CHECK(std::abs(y[i].second[d] - direct[d]) < 1e-4f);
      }
    }
  }
}

TEST_CASE("a lower copy and a summary do not outlive the rotation of their keys") {
  Regime r(RopeRegime::re_rotate);
  for (int t = 0; t < 15; ++t) r.add();
  const Lists pages(1, {0, 1, 2}), first(1, {0}), later(1, {1, 2});
  Edits down;
  down.offload(pages.pages());
  r.apply(down);
  Edits evict;
  evict.evict(first.tokens());
  r.apply(evict);
  const auto before = test::stored_tokens(*r.store, 0, r.slot, 0);
  Edits round_trip;  // pages come back from the host with the same bytes
  round_trip.offload(later.pages());
  round_trip.drop(Tier::device, later.pages());
  round_trip.recall(later.pages());
  r.apply(round_trip);
  CHECK(test::stored_tokens(*r.store, 0, r.slot, 0) == before);
  const Summaries s = r.store->summaries(0);
  for (int page = 0; page < 4; ++page) {
    float lo;
    std::memcpy(&lo, s.at(r.slot, 0, page), 4);
    float wanted = INFINITY;
    for (int t = page * 4; t < std::min(14, page * 4 + 4); ++t)
      wanted = std::min(wanted, before[static_cast<std::size_t>(t)].k[0]);
    CHECK(lo == wanted);
  }
  r.store->check_invariants();
}
