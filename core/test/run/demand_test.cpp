// What policies of two tiers say that a sequence takes, against the frames that the ledger counts.
#include <catch2/catch.hpp>

#include "support/cell_fixture.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr int page = 8, prompt = 150, steps = 60;

// Bytes of a page of every KV head.
std::int64_t pages_of_all_heads(const Engine& engine) { return engine.full_bytes(1); }

// The most that frames of the device took since the peak was reset. Tables and state stay as they are. Summaries are
// those of now, so a peak of long ago counts a little less.
std::int64_t peak(Engine& engine) {
  const Ledger& ledger = engine.ledger();
  return ledger.peak(Tier::device) - (ledger.total(Tier::device) - engine.used_bytes());
}

PolicySpec spec_of(const std::string& text, bool profile = false) {
  PolicySpec spec = policy_of("{" + text + "}", page);
  if (profile) spec.profile = "of all profilers";
  return spec;
}

}  // namespace

TEST_CASE("a policy of two tiers says what it takes of each, no less and at most two pages a head more") {
  const auto model = tiny_model("llama-gqa3");
  for (const std::string text :
       {"flexicache: {rerank_every: 4, budget: {tokens: 64}}",
        "flexicache: {rerank_every: 4, keep_new: false, unstable_heads: false, budget: {tokens: 64}}",
        "flexicache: {rerank_every: 4, unstable_heads: false, dense_layers: 1, budget: {ratio: 0.4}}",
        "flexicache: {rerank_every: 4, unstable_heads: false, first_query: step, budget: {tokens: 64}}",
        "flexicache: {rerank_every: 4, unstable_heads: false, overlap: false, budget: {tokens: 64}}",
        "flexicache: {unstable_heads: false, reranking: false, budget: {tokens: 64}}",
        "freekv: {sinks: 10, window: 14, budget: {tokens: 96}}",
        "freekv: {sinks: 10, window: 14, dense_layers: 0, speculation: false, budget: {ratio: 0.5}}",
        "arkvale: {sinks: 10, window: 14, dense_layers: 1, budget: {tokens: 96}}",
        "arkvale: {sinks: 10, window: 14, dense_layers: 0, budget: {ratio: 0.5}}",
        "infllm: {sinks: 8, window: 16, block: 8, budget: {tokens: 80}}",
        "infinigen: {skew: false, dense_layers: 1, cap: 5, tokens: 48}",
        "quest: {dense_layers: 1, budget: {tokens: 64}, placement: {tier: host, resident: 16}}",
        "quest: {dense_layers: 0, last_page: true, budget: {tokens: 24}, placement: {tier: host, resident: 48}}"}) {
    CAPTURE(text);
    const PolicySpec spec = spec_of(text, text.starts_with("flexicache") && text.find("unstable") == text.npos);
    EngineOptions o;
    o.slots = 1, o.max_tokens = prompt + steps, o.page_size = page, o.budget = spec.budget;
    Engine engine(model, subjects().policy(spec, *model), o);
    const Engine::Demanded says = engine.demanded(prompt, steps);
    const std::int64_t some = 2 * pages_of_all_heads(engine);
    const int slot = engine.open();
    REQUIRE(engine.prefill(slot, test_text(prompt, model->config.vocab), true, {}) == Fit::ok);
    CHECK(engine.used_bytes() <= says.prompt);
    CHECK(says.prompt <= engine.used_bytes() + some);
    std::vector<std::int32_t> likeliest(1);
    const auto step = [&](int i) {
      const std::vector<int> token{(31 * i + 7) % model->config.vocab};
      REQUIRE(engine.step({slot}, token, StepResult(likeliest)) == Fit::ok);
    };
    step(0);  // before it a first choice may be missing
    engine.ledger().reset_peak();
    for (int i = 1; i < steps; ++i) step(i);
    REQUIRE(says.decode >= 0);
    CHECK(peak(engine) <= says.decode);
    CHECK(says.decode <= peak(engine) + some);
    CHECK(engine.host_used_bytes() <= says.host);
    CHECK(says.host <= engine.host_used_bytes() + some);
  }
}

// Heads that keep everything round up to a page by themselves, and so do the others.
TEST_CASE("a policy whose heads drop tokens says what stays of every prompt, no less and at most a page a head more") {
  const auto model = tiny_model("llama-gqa3");
  const int longest = 5 * page, after = 2 * page;
  for (const std::string text :
       {"duo_attention: {sinks: 3, window: 10, sparsity: 0.5}", "duo_attention: {sinks: 0, window: 8, sparsity: 0.8}",
        "duo_attention: {sinks: 3, window: 10, retrieval_heads: false}",
        "lserve: {sinks: 3, window: 10, prompt_window: 0, tokens: 32, parts: 2}",
        "subgen: {sinks: 3, window: 9, clusters: 4, values: 4}",
        "razor_attention: {sinks: 3, window: 6, window_share: 0.4, induction: 0.3}",
        "razor_attention: {sinks: 3, window: 6, window_share: 0, induction: 0.3}",
        "razor_attention: {sinks: 3, window: 6, window_share: 0.4, induction: 0.3, while_decoding: false}",
        "razor_attention: {sinks: 3, window: 6, window_share: 0.4, retrieval_heads: false}"}) {
    CAPTURE(text);
    const bool reads = text.find("retrieval_heads: false") == text.npos && !text.starts_with("subgen");
    const PolicySpec spec = spec_of(text, reads);
    EngineOptions o;
    o.slots = 1, o.max_tokens = longest + after, o.page_size = page;
    Engine engine(model, subjects().policy(spec, *model), o);
    const std::int64_t some = pages_of_all_heads(engine);
    std::vector<std::int32_t> likeliest(1);
    for (int tokens = 1; tokens <= longest; ++tokens) {
      CAPTURE(tokens);
      const Engine::Demanded says = engine.demanded(tokens, after);
      const int slot = engine.open();
      REQUIRE(engine.prefill(slot, test_text(tokens, model->config.vocab), true, {}) == Fit::ok);
      CHECK(engine.used_bytes() <= says.prompt);
      CHECK(says.prompt <= engine.used_bytes() + some);
      engine.ledger().reset_peak();
      for (int i = 0; i < after; ++i)
        REQUIRE(engine.step({slot}, std::vector<int>{(31 * i + 7) % model->config.vocab}, StepResult(likeliest)) ==
                Fit::ok);
      CHECK(peak(engine) <= says.decode);
      CHECK(says.decode <= peak(engine) + some);
      CHECK(says.host == -1);
      engine.close(slot);
    }
  }
}

// Tokens of heads are ragged here, and what follows the prompt stays.
TEST_CASE("policies whose tokens lie in many pages say what their prompts leave on each tier") {
  const auto model = tiny_model("llama-gqa3");
  for (const std::string text : {"shadowkv: {rank: 8, outliers: 2, local_chunks: 2, budget: {tokens: 64}}",
                                 "heterocache: {budget: {ratio: 0.6}}",
                                 "omnikv: {filter_layers: '0', wait_layers: 0, offload: true, budget: {tokens: 6}}",
                                 "clusterkv: {sinks: 3, window: 8, window_clusters: 2, dense_layers: 0, "
                                 "tokens_per_cluster: 5, offload: true, budget: {tokens: 10}}"}) {
    CAPTURE(text);
    const PolicySpec spec = spec_of(text, text.starts_with("heterocache"));
    EngineOptions o;
    o.slots = 1, o.max_tokens = prompt + steps, o.page_size = page, o.budget = spec.budget;
    Engine engine(model, subjects().policy(spec, *model), o);
    const Engine::Demanded says = engine.demanded(prompt, steps);
    const int slot = engine.open();
    REQUIRE(engine.prefill(slot, test_text(prompt, model->config.vocab), true, {}) == Fit::ok);
    CHECK(says.prompt < engine.full_bytes(prompt));
    CHECK(engine.used_bytes() <= says.prompt);
    std::vector<std::int32_t> likeliest(1);
    engine.ledger().reset_peak();
    for (int i = 0; i < steps; ++i)
      REQUIRE(engine.step({slot}, std::vector<int>{(31 * i + 7) % model->config.vocab}, StepResult(likeliest)) ==
              Fit::ok);
    CHECK(peak(engine) <= says.decode);
    CHECK(engine.host_used_bytes() > 0);
    CHECK(engine.host_used_bytes() <= says.host);
  }
}

TEST_CASE("a budget in bytes leaves the device to what earlier prompts took, and the host is known") {
  const auto model = tiny_model("llama-gqa3");
  const PolicySpec spec = spec_of("freekv: {sinks: 8, window: 8, dense_layers: 0, budget: {bytes: 1MiB}}");
  EngineOptions o;
  o.slots = 1, o.max_tokens = 128, o.page_size = page, o.budget = spec.budget;
  const Engine engine(model, subjects().policy(spec, *model), o);
  const Engine::Demanded says = engine.demanded(64, 16);
  CHECK(says.prompt == engine.full_bytes(64));
  CHECK(says.decode == -1);
  CHECK(says.host == engine.full_bytes(80));
}
