// The ids of the text that a policy asks for.
#include <catch2/catch.hpp>

#include "engine/engine.hpp"
#include "model/checkpoint.hpp"
#include "support/golden.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

using Ids = std::vector<int>;

// Records the ids of a row's text in each callback. It evicts, so that places are no text positions.
struct Reader final : Policy {
  explicit Reader(bool asks = true) : asks_(asks) {}
  Needs needs() const override { return Needs{}.token_ids(asks_); }
  void prefill(const LayerPrefill& kv, Edits& edits, Stream) override {
    read(kv);
    const std::int32_t keep[] = {2, 2};
    if (kv.last[0]) edits.evict_surplus({.keep = kv.upload_heads("keep", keep)});
  }
  void observe(const LayerStep& kv, Edits&, Stream) override { read(kv); }
  void read(const LayerKv& kv) {
    if (kv.layer > 0) return;
    has_text = static_cast<bool>(kv.text.ids);
    if (!has_text) return;
    texts.clear();
    for (int r = 0; r < kv.rows(); ++r) {
      texts.emplace_back();
      for (int p = 0; p < kv.position[r]; ++p) texts.back().push_back(kv.text.ids(kv.slots[r], p));
    }
    vocabulary = kv.text.kinds.extent[0];
  }
  std::vector<Ids> texts;
  std::int64_t vocabulary = 0;
  bool has_text = false;

 private:
  bool asks_;
};

EngineOptions options(int chunk) {
  EngineOptions o;
  o.max_tokens = 16, o.slots = 3, o.prefill_chunk = chunk, o.page_size = 4;
  return o;
}

std::shared_ptr<const Model> model() {
  static const std::shared_ptr<const Model> tiny =
      load_model(*open_checkpoint(golden("tiny/llama-gqa3")), DType::f32, "tiny");
  return tiny;
}

}  // namespace

TEST_CASE("a policy that asks for them sees the ids of each row's text") {
  const int chunk = GENERATE(0, 2);
  const auto policy = std::make_shared<Reader>();
  Engine engine(model(), policy, options(chunk));
  REQUIRE(model()->config.kv_heads <= 2);
  const int a = engine.open(1), b = engine.open(2);
  REQUIRE(engine.prefill(a, Ids{1, 2, 3, 4, 5}, false, {}) == Fit::ok);
  REQUIRE(engine.prefill(a, Ids{6}, true, {}) == Fit::ok);
  CHECK(policy->texts == std::vector<Ids>{{1, 2, 3, 4, 5, 6}});
  CHECK(policy->vocabulary == model()->config.vocab);
  REQUIRE(engine.prefill(b, Ids{7, 8, 9}, true, {}) == Fit::ok);
  CHECK(policy->texts == std::vector<Ids>{{7, 8, 9}});
  REQUIRE(engine.step({b, a}, Ids{10, 11}, {}) == Fit::ok);
  CHECK(policy->texts == std::vector<Ids>{{7, 8, 9, 10}, {1, 2, 3, 4, 5, 6, 11}});
  // A saved sequence keeps its text, in another slot too, and one that was set aside.
  const SavedSequence saved = engine.save(a);
  const int c = engine.open(3);
  REQUIRE(engine.restore(c, saved) == Fit::ok);
  REQUIRE(engine.step({c}, Ids{12}, {}) == Fit::ok);
  CHECK(policy->texts == std::vector<Ids>{{1, 2, 3, 4, 5, 6, 11, 12}});
  const auto aside = engine.set_aside(b);
  REQUIRE(aside);
  engine.close(a);
  const int d = engine.open(4);
  REQUIRE(engine.prefill(d, Ids{3, 3, 3, 3, 3}, true, {}) == Fit::ok);
  const int e = engine.open(5);
  REQUIRE(engine.bring_back(e, *aside) == Fit::ok);
  REQUIRE(engine.step({e, d}, Ids{13, 14}, {}) == Fit::ok);
  CHECK(policy->texts == std::vector<Ids>{{7, 8, 9, 10, 13}, {3, 3, 3, 3, 3, 14}});
}

TEST_CASE("a policy that does not ask for ids gets none and pays nothing") {
  const auto without = std::make_shared<Reader>(false), with = std::make_shared<Reader>();
  Engine engine(model(), without, options(0));
  REQUIRE(engine.prefill(engine.open(), Ids{1, 2}, true, {}) == Fit::ok);
  CHECK_FALSE(without->has_text);
  const std::int64_t more =
      Engine::memory(*model(), *with, options(0)).tables - Engine::memory(*model(), *without, options(0)).tables;
  CHECK(more == 3 * 16 * 4 + model()->config.vocab);
}
