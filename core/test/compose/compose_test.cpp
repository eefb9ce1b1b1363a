#include "compose/compose.hpp"

#include <kvlab/ops.hpp>

#include <catch2/catch.hpp>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "engine/engine.hpp"
#include "model/checkpoint.hpp"
#include "support/golden.hpp"

using namespace kvlab;

namespace {

class Recency : public Scorer {
 public:
  explicit Recency(int every) : every_(every) {}
  void score(const LayerKv& kv, Scores out, Stream s) override { ops::recency(kv.pages, out, s); }
  int every() const override { return every_; }

 private:
  int every_;
};

// Tokens of each KV head after a prompt of 16, and after each of 7 steps, with a budget of 16.
std::vector<int> lengths(int scorers_own, std::optional<int> every) {
  static const auto model = load_model(*open_checkpoint(test::golden("tiny/llama-gqa3")), DType::f32, "tiny");
  Composition parts;
  parts.scorer = Instance<Scorer>(new Recency(scorers_own),
                                  PluginDeleter{nullptr, [](void* p) { delete static_cast<Scorer*>(p); }});
  parts.every = every;
  EngineOptions o;
  o.max_tokens = 64;
  o.page_size = 8;
  o.budget = {BudgetAmount::tokens, 16};
  Engine engine(model, compose(std::move(parts)), o);
  const int slot = engine.open(), token = 3;
  REQUIRE(engine.prefill(slot, std::vector<int>(16, token), true, {}) == Fit::ok);
  std::vector<int> out{engine.store().length(0, slot, 0)};
  for (int i = 0; i < 7; ++i) {
    REQUIRE(engine.step({slot}, {&token, 1}, {}) == Fit::ok);
    out.push_back(engine.store().length(0, slot, 0));
  }
  return out;
}

}  // namespace

TEST_CASE("a schedule evicts after every n-th decode step, the scorer's own where none is given") {
  using Ints = std::vector<int>;
  CHECK(lengths(0, 3) == Ints{16, 17, 18, 16, 17, 18, 16, 17});
  CHECK(lengths(1, 3) == Ints{16, 17, 18, 16, 17, 18, 16, 17});
  CHECK(lengths(2, std::nullopt) == Ints{16, 17, 16, 17, 16, 17, 16, 17});
  CHECK(lengths(1, std::nullopt) == Ints(8, 16));
  CHECK(lengths(1, 0) == Ints{16, 17, 18, 19, 20, 21, 22, 23});
}

TEST_CASE("a budget in bytes pays for every KV head of the dense layers before it buys pages of the others") {
  Shape s;
  s.layers = 4, s.kv_heads = 2, s.page_size = 8;
  const auto tokens = [&](double bytes, int dense_layers) {
    return budget_tokens({BudgetAmount::bytes, bytes}, 20, s, 100, dense_layers);  // 20 tokens take 3 pages
  };
  CHECK(tokens(8 * 200, 0) == 16);
  CHECK(tokens(8 * 200 - 1, 0) == 8);
  CHECK(tokens(2 * 300 + 6 * 200, 1) == 16);
  CHECK(tokens(2 * 300 + 6 * 200 - 1, 1) == 8);
  CHECK(tokens(6 * 300 + 2 * 100, 3) == 8);
  CHECK(tokens(6 * 300, 3) == 8);                          // a page at least
  CHECK(tokens(1, 4) == std::numeric_limits<int>::max());  // nothing is ever evicted
}
