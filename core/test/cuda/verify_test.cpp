// The device finds wrong numbers of plugins.
#include "ops/score/verify.hpp"

#include <catch2/catch.hpp>
#include <limits>

#include "cases/paged_fixture.hpp"
#include "cases/place.hpp"
#include "compose/compose.hpp"
#include "engine/engine.hpp"
#include "ops/select/allot.hpp"
#include "plugin/loader.hpp"
#include "support/contract.hpp"

using namespace kvlab;
using namespace kvlab::test;
using namespace kvlab::cases;

namespace {

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

bool same(const ops::Finding& a, const ops::Finding& b) {
  return a.count == b.count && a.first == b.first && a.over == b.over;
}

class Recency : public Scorer {
 public:
  explicit Recency(bool wrong) : wrong_(wrong) {}
  void score(const LayerKv& kv, Scores out, Stream s) override {
    ops::recency(kv.pages, out, s);
    if (wrong_ && kv.layer == 1) ops::scale(out, not_a_number, s);
  }

 private:
  bool wrong_;
};

class Even : public Budget {
 public:
  explicit Even(int tokens) : tokens_(tokens) {}
  void allot(const Allotment& a, Stream s) override {
    if (tokens_ == 0) return ops::allot_uniform(a, s);
    ops::fill_heads(a.keep, tokens_, s);
  }

 private:
  int tokens_;
};

// Wraps the object as a plugin of this name.
template <class Interface>
Instance<Interface> plugin(const char* name, Interface* object) {
  PluginInfo info;
  info.name = name;
  info.library = "/lib/own.so";
  return guarded(
      info, Instance<Interface>(object, PluginDeleter{nullptr, [](void* p) { delete static_cast<Interface*>(p); }}));
}

// The error of a prompt of 40 tokens under a budget of 16, empty without one.
std::string said(bool nan_scores, int keep) {
  Composition parts;
  parts.scorer = plugin<Scorer>("own_scorer", new Recency(nan_scores));
  parts.split = plugin<Budget>("own_budget", new Even(keep));
  EngineOptions o;
  o.device = Device::cuda;
  o.max_tokens = 64;
  o.page_size = 8;
  o.budget = {BudgetAmount::tokens, 16};
  const auto model = fresh_tiny_model("llama-gqa3", DType::bf16, Device::cuda);
  Engine engine(model, compose(std::move(parts)), o);
  try {
    engine.prefill(engine.open(1), test_text(40, model->config.vocab), true, {});
  } catch (const Error& e) {
    CHECK(e.code() == Errc::plugin);
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("cuda verify: find_nan equals the host's on caches of every kind") {
  int with_nan = 0;  // caches
  for (unsigned n = 0; n < 12; ++n) {
    CAPTURE(n);
    RandomCache c(n);
    const PagedKv kv = c.cache.view();
    OnDevice device;
    const PagedKv on_device = device.put(kv, c.cache.arena_bytes());
    auto in = c.normal(std::int64_t{c.rows()} * c.kv_heads() * c.room());
    const auto scores = View<float, 3>::dense(in.data(), {c.rows(), c.kv_heads(), c.room()});
    for (std::size_t i = 0; n % 3 && i < in.size(); i += 1 + n % 5) in[i] = not_a_number;
    ops::Finding wanted;
    ops::Finding* got = device.put(&wanted, 1);
    for (const int layer : {n % 2 ? 4 : 2, 3}) {
      ops::find_nan(kv, layer, scores, &wanted, Stream::cpu());
      ops::find_nan(on_device, layer, device.put(scores), got, device.stream());
    }
    if (n % 3 == 0) CHECK(wanted.count == 0);
    with_nan += wanted.count > 0;
    CHECK(same(device.get(View<ops::Finding, 1>::dense(got, {1}))[0], wanted));
  }
  CHECK(with_nan > 4);
}

TEST_CASE("cuda verify: find_keep equals the host's") {
  OnDevice device;
  constexpr int rows = 300, heads = 5;
  std::vector<std::int32_t> keep(rows * heads), length(keep.size()), total(rows);
  std::vector<Pins> pins(rows);
  for (int row = 0; row < rows; ++row) total[row] = 40 + row % 7, pins[row] = {row % 3, row % 2};
  for (std::size_t i = 0; i < keep.size(); ++i) {
    length[i] = static_cast<std::int32_t>(i * 37 % 101);
    keep[i] = length[i] + (i % 50 == 49 ? 1 : 0) - (i % 70 == 69 ? 200 : 0);
  }
  Allotment a;
  a.layers = 3;
  a.keep = View<std::int32_t, 2>::dense(keep.data(), {rows, heads});
  a.length = View<const std::int32_t, 2>::dense(length.data(), {rows, heads});
  a.total = total.data();
  Allotment there = a;
  there.keep = device.put(a.keep);
  there.length = device.put(a.length);
  there.total = device.put(total.data(), total.size());
  std::vector<std::int64_t> kept(rows, -7);
  std::int64_t* kept_there = device.put(kept.data(), kept.size());
  ops::Finding wanted;
  ops::Finding* got = device.put(&wanted, 1);
  for (const bool pinned : {false, true}) {
    a.pins = pinned ? pins.data() : nullptr;
    there.pins = pinned ? device.put(pins.data(), pins.size()) : nullptr;
    for (const int layer : {0, 1, 0, 1, 2}) {
      a.layer = there.layer = layer;
      ops::find_keep(a, kept.data(), &wanted, Stream::cpu());
      ops::find_keep(there, kept_there, got, device.stream());
    }
    CHECK(wanted.count > 0);
    CHECK(wanted.over > 0);
    CHECK(same(device.get(View<ops::Finding, 1>::dense(got, {1}))[0], wanted));
    CHECK(device.get(View<std::int64_t, 1>::dense(kept_there, {rows})) == kept);
  }
}

TEST_CASE("cuda verify: wrong numbers of a scorer or a budget fail the call and name plugin, file and callback") {
  CHECK(said(false, 0) == "");
  CHECK_THAT(said(true, 0),
             Catch::Contains("plugin own_scorer (/lib/own.so), score()") &&
                 Catch::Contains("got NaN as the score of the token at position 0 (layer 1, KV head 0)"));
  const std::string own_budget = "plugin own_budget (/lib/own.so), allot()";
  CHECK_THAT(said(false, -2),
             Catch::Contains(own_budget) && Catch::Contains("got -2 tokens to keep in layer 0, KV head 0"));
  CHECK_THAT(said(false, 41),
             Catch::Contains(own_budget) && Catch::Contains("got 41 tokens to keep in layer 0, KV head 0"));
  CHECK_THAT(said(false, 30), Catch::Contains(own_budget) && Catch::Contains("over all layers and KV heads"));
}
