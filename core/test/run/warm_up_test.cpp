#include "run/warm_up.hpp"

#include <catch2/catch.hpp>

#include "support/cell_fixture.hpp"

using namespace kvlab;

namespace {

struct Fixture : test::CellFixture {
  explicit Fixture(const char* policy, const char* name = "llama-gqa3")
      : CellFixture(test::tiny_model(name), test::policy_of(policy, 8),
                    {Metric::score, Metric::memory, Metric::trace}) {
    experiment.batch = 2;
    prompt(40, 1);
    prompt(33, 2);
    prompt(150, 3);
  }
  void prompt(int tokens, unsigned seed) { add(test::test_text(tokens, model->config.vocab, seed), {}, 6); }
};

void same_memory(const results::CellResult& a, const results::CellResult& b) {
  CHECK(a.summary.device_bytes_peak == b.summary.device_bytes_peak);
  CHECK(a.summary.host_bytes_peak == b.summary.host_bytes_peak);
  REQUIRE(a.ledger.size() == b.ledger.size());
  for (std::size_t i = 0; i < a.ledger.size(); ++i) {
    CAPTURE(i, a.ledger[i].engine_step, a.ledger[i].tier, a.ledger[i].tag);
    CHECK(a.ledger[i].engine_step == b.ledger[i].engine_step);
    CHECK(a.ledger[i].tier == b.ledger[i].tier);
    CHECK(a.ledger[i].tag == b.ledger[i].tag);
    CHECK(a.ledger[i].codec == b.ledger[i].codec);
    CHECK(a.ledger[i].held == b.ledger[i].held);
    CHECK(a.ledger[i].moved == b.ledger[i].moved);
  }
}

void same(const results::CellResult& a, const results::CellResult& b) {
  REQUIRE(a.summary.status == "ok");
  REQUIRE(b.summary.status == "ok");
  REQUIRE(a.samples.size() == b.samples.size());
  for (std::size_t i = 0; i < a.samples.size(); ++i) {
    CHECK(a.samples[i].output == b.samples[i].output);
    CHECK(a.samples[i].output_tokens == b.samples[i].output_tokens);
  }
  CHECK(a.summary.fired == b.summary.fired);
  CHECK(a.summary.device_bytes_decode == b.summary.device_bytes_decode);
  CHECK(a.trace.kept == b.trace.kept);
  CHECK(a.trace.selected == b.trace.selected);
  same_memory(a, b);
}

}  // namespace

TEST_CASE("one prompt of each length that kernels tell apart is warmed up, the longest of it, longest first") {
  Fixture f("full");
  f.prompt(300, 4);  // lengths are rounded to 64, 192 and 384
  f.prompt(310, 5);
  const auto prompts = prompts_of_shapes(f.items.items);
  std::vector<std::size_t> lengths;
  for (const Item* item : prompts) lengths.push_back(item->prompt.size());
  CHECK(lengths == std::vector<std::size_t>{310, 150, 40});
}

TEST_CASE("a process warms a shape up once") {
  Fixture f("window: {budget: {tokens: 24}}", "qwen3");
  CHECK(warm_shapes(f.input(), 2) == 2);
  CHECK(warm_shapes(f.input(), 2) == 0);
  f.cell.id = "another";
  f.experiment.policies[0].budget.value = 32;  // the same kernels
  CHECK(warm_shapes(f.input(), 2) == 0);
  f.prompt(41, 9);
  CHECK(warm_shapes(f.input(), 2) == 0);
  f.prompt(400, 9);
  CHECK(warm_shapes(f.input(), 2) == 1);
  CHECK(warm_shapes(f.input(), 3) == 3);  // more rows in a step
  f.experiment.policies = {test::policy_of("snapkv: {budget: {tokens: 24}, window: 8}", 8)};
  CHECK(warm_shapes(f.input(), 2) == 3);
}

TEST_CASE("results are the same bits with a warm-up and without, in the first cell and in the second") {
  for (const char* policy :
       {"full", "h2o: {budget: {tokens: 24}}", "snapkv: {budget: {tokens: 24}, window: 8}",
        "quest: {budget: {tokens: 24}}", "quest: {budget: {tokens: 24}, placement: {tier: host, resident: 32}}"}) {
    CAPTURE(policy);
    Fixture f(policy);
    const results::CellResult cold = f.run();
    f.experiment.metrics.insert(Metric::latency);
    warm_shapes(f.input(), 2);
    const results::CellResult first = f.run();
    CHECK(warm_shapes(f.input(), 2) == 0);
    const results::CellResult second = f.run();
    same(cold, first);
    same(cold, second);
  }
}

TEST_CASE("the tokens that touch a timed cell's engine are not in its ledger") {
  const char* const host = "quest: {budget: {tokens: 16}, min_pages: 1, placement: {tier: host, resident: 8}}";
  for (const char* policy : {"full", host})
    for (const int answer : {1, 6}) {  // fewer tokens than touch() feeds, and more
      CAPTURE(policy, answer);
      test::CellFixture f(test::tiny_model("llama-gqa3"), test::policy_of(policy, 8), {Metric::score, Metric::memory});
      f.add(test::test_text(16, f.model->config.vocab, 1), {}, answer);
      const results::CellResult untouched = f.run();
      REQUIRE(untouched.summary.status == "ok");
      REQUIRE((policy != host || untouched.summary.host_bytes_peak > 0));
      f.experiment.metrics.insert(Metric::latency);
      same_memory(untouched, f.run());
    }
}

TEST_CASE("a warm-up that does not fit leaves it to the cell to say so") {
  Fixture f("full", "llama-mha");
  f.leave_for_pages(16 * 1024, 2);
  CHECK(warm_shapes(f.input(), 2) == 2);
  CHECK(f.run().summary.status == "oom");
}
