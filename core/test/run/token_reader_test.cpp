// What traces and fidelity say of a policy that attends to tokens.
#include "support/token_reader.hpp"

#include <catch2/catch.hpp>

#include "run/shadow.hpp"
#include "run/trace.hpp"
#include "support/contract.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

// 20 tokens in pages of 8, then one step.
void run(EngineObserver& observer, int newest) {
  const auto model = tiny_model("llama-gqa3");
  EngineOptions o;
  o.slots = 1;
  o.max_tokens = 64;
  o.page_size = 8;
  o.device = model->cuda ? Device::cuda : Device::cpu;
  Engine engine(model, std::make_shared<TokenReader>(newest), o);
  engine.observe(&observer);
  const int slot = engine.open(), token = 3;
  REQUIRE(engine.prefill(slot, test_text(20, model->config.vocab), true, {}) == Fit::ok);
  REQUIRE(engine.step({slot}, {&token, 1}, {}) == Fit::ok);
}

}  // namespace

TEST_CASE("a trace has the pages that listed tokens lie in") {
  const auto model = tiny_model("llama-gqa3");
  results::Trace trace;
  TraceRecorder recorder({Item{}}, trace);
  recorder.rows({{0, 0}});
  run(recorder, 4);  // tokens 0, 1 and 17 to 20
  REQUIRE(trace.events.size() == static_cast<std::size_t>(model->config.layers * model->config.kv_heads));
  for (const results::TraceEvent& e : trace.events) {
    REQUIRE(e.count == 2);
    CHECK(trace.selected[static_cast<std::size_t>(e.begin)] == 0);
    CHECK(trace.selected[static_cast<std::size_t>(e.begin) + 1] == 2);
  }
}

TEST_CASE("fidelity counts the mass of listed tokens alone") {
  const auto model = tiny_model("llama-gqa3");
  std::vector<float> last;
  for (const int newest : {1, 4, 12, 19, 64}) {
    CAPTURE(newest);
    Shadow shadow(*model, 8, 64);
    run(shadow, newest);
    const Shadow::Rows rows = shadow.take();
    REQUIRE(rows.mass.size() == static_cast<std::size_t>(model->config.layers));
    for (std::size_t i = 0; i < rows.mass.size(); ++i) {
      if (!last.empty()) CHECK(rows.mass[i] > last[i]);
      CHECK((rows.mass[i] > 0.9999f) == (newest >= 19));
      if (newest >= 19) CHECK(rows.output_error[i] < 0.02f);
      if (newest >= 12) CHECK(rows.page_recall[i] == 1.f);
    }
    last = newest == 19 ? std::vector<float>{} : rows.mass;
  }
}
