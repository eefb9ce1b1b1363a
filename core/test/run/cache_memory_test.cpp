// device_memory: how a cap is divided, and that the parts stay within it.
#include <catch2/catch.hpp>

#include "support/cell_fixture.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

EngineOptions options_of(const PolicySpec& spec) {
  EngineOptions o;
  o.slots = 3;
  o.max_tokens = 192;
  o.page_size = spec.page_size;
  o.budget = spec.budget;
  o.recorded = made_up_future();
  return o;
}

std::int64_t held(const Ledger& ledger) {
  std::int64_t sum = 0;
  for (const std::int64_t bytes : ledger.held(Tier::device)) sum += bytes;
  return sum;
}

// Prefills prompts of all slots and decodes until they are full or the cache is. Returns whether the cache was.
bool fill(Engine& engine, std::int64_t cap) {
  const auto check = [&] { REQUIRE(held(engine.ledger()) <= cap); };
  check();
  const int vocab = engine.model().config.vocab;
  std::vector<std::int32_t> slots;
  for (int i = 0; i < 3; ++i) {
    slots.push_back(engine.open());
    if (engine.prefill(slots.back(), test_text(100, vocab), true, {}) != Fit::ok) return true;
    check();
  }
  std::vector<std::int32_t> likeliest(slots.size());
  const std::vector<int> tokens(slots.size(), 7);
  for (int i = 0; i < 90; ++i) {
    if (engine.step(slots, tokens, StepResult(likeliest)) != Fit::ok) return true;
    check();
  }
  return false;
}

}  // namespace

TEST_CASE("under device_memory the bytes that the cache holds stay below it, and pages get the rest") {
  const auto model = tiny_model("llama-gqa3");
  for (const char* text : {"full", "{quest: {dense_layers: 0, budget: {tokens: 24}}}", "{h2o: {budget: {tokens: 24}}}",
                           "{quest: {dense_layers: 0, budget: {tokens: 24}, placement: {tier: host, resident: 16}}}",
                           "{flexicache: {unstable_heads: false, budget: {tokens: 32}, rerank_every: 4}}",
                           "{freekv: {sinks: 8, window: 8, dense_layers: 0, budget: {tokens: 32}}}",
                           "{arkvale: {sinks: 8, window: 8, dense_layers: 0, budget: {tokens: 48}}}"}) {
    CAPTURE(text);
    const PolicySpec spec = policy_of(text, 8);
    const auto policy = [&] { return subjects().policy(spec, *model); };
    EngineOptions o = options_of(spec);
    const CacheMemory m = Engine::memory(*model, *policy(), o);
    const bool places = spec.placement.tier == Tier::host || spec.policy, scores = spec.name == "h2o";
    CHECK((m.summaries > 0) == (spec.selector || spec.policy));
    const std::int64_t cap = m.beside_pages() + 45 * m.heads * m.page;
    Engine::fit(o, cap, *model, *policy());
    CHECK(o.device_limit == 45 * m.heads * m.frame);
    Engine engine(model, policy(), o);
    CHECK(fill(engine, cap) == !(places || scores));
    if (!places && !scores) CHECK(engine.used_bytes() > 44 * m.heads * m.frame);
  }
}

TEST_CASE("a device_memory that is a byte too small names each part and the least that would do") {
  const auto model = tiny_model("llama-gqa3");
  const PolicySpec spec = policy_of("{quest: {dense_layers: 0, budget: {tokens: 24}}}", 8);
  const auto policy = [&] { return subjects().policy(spec, *model); };
  for (const int slots : {1, 3}) {
    EngineOptions o = options_of(spec);
    o.slots = slots;
    const CacheMemory m = Engine::memory(*model, *policy(), o);
    std::string said;
    try {
      Engine::fit(o, m.least() - 1, *model, *policy());
    } catch (const NoRoom& e) {
      said = e.what();
    }
    CHECK_THAT(said, Catch::StartsWith("got device_memory of " + std::to_string(m.least() - 1) +
                                       " bytes, wanted at least " + std::to_string(m.least()) + " for " +
                                       (slots == 1 ? "1 sequence:" : "3 sequences at once:")));
    for (const auto& [part, bytes] : {std::pair{"tables and lists ", m.tables},
                                      {"page summaries ", m.summaries},
                                      {"scratch of callbacks ", m.scratch},
                                      {"a page of each KV head ", m.heads * m.page}}) {
      CHECK(bytes > 0);
      CHECK_THAT(said, Catch::Contains(part + std::to_string(bytes)));
    }
    Engine::fit(o, m.least(), *model, *policy());
    Engine engine(model, policy(), o);
    const int slot = engine.open();
    CHECK(engine.prefill(slot, test_text(8, model->config.vocab), true, {}) == Fit::ok);
    CHECK(engine.prefill(slot, test_text(1, model->config.vocab), true, {}) == Fit::out_of_memory);
  }
}

TEST_CASE("every policy's scratch fits what device_memory keeps for it") {
  const auto model = tiny_model("llama-gqa3");
  for (const Subject& s : subjects().list()) {
    CAPTURE(s.label);
    const PolicySpec spec = with_budget(s.spec, BudgetAmount::tokens, 64);
    EngineOptions o = options_of(spec);
    Engine::fit(o, 1 << 30, *model, *subjects().policy(spec, *model));
    Engine engine(model, subjects().policy(spec, *model), o);
    CHECK_FALSE(fill(engine, 1 << 30));
  }
}

TEST_CASE("scratch beyond what device_memory keeps for it ends with a message that names it") {
  Ledger ledger;
  StoreWorkspace w(ledger, Stream::cpu(), 1024);
  CHECK(ledger.held(Tier::device)[static_cast<std::size_t>(Tag::workspace)] == 1024);
  w.scratch("scores", 960);
  w.reset();
  w.scratch("scores", 960);
  w.scratch("lists", 64);
  CHECK_THROWS_WITH(w.scratch("more", 1), Catch::Contains("got 1088 bytes of a callback's scratch with 'more', wanted "
                                                          "at most the 1024"));
  CHECK(ledger.held(Tier::device)[static_cast<std::size_t>(Tag::workspace)] == 1024);
}
