// Fidelity's copy of the whole cache in device memory gives the figures of a copy on the host.
#include "run/shadow.hpp"

#include <catch2/catch.hpp>

#include "support/contract.hpp"
#include "support/token_reader.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

class OtherRegime final : public Policy {
 public:
  Needs needs() const override { return Needs{}.rope(RopeRegime::cache_relative); }
};

// A prompt in two parts and four steps of one engine, which two shadows follow.
struct Both final : EngineObserver {
  explicit Both(std::shared_ptr<Policy> policy) : engine(model, std::move(policy), options()) { engine.observe(this); }
  static EngineOptions options() {
    EngineOptions o;
    o.device = Device::cuda;
    o.max_tokens = 96;
    o.page_size = 8;
    return o;
  }
  Prompt reads_of_prompt() const override { return there.reads_of_prompt(); }
  void prompt(const PromptLayer& l, const Store& s) override {
    there.prompt(l, s);
    here.prompt(there.reads_of_prompt() == Prompt::in_place ? copy.of(l, true, s.stream()) : l, s);
  }
  bool steps_in_place() const override { return true; }
  void attended(const DecodeLayer& l, const Store& s) override {
    there.attended(l, s);
    here.attended(l, s);
  }
  void run() {
    const int slot = engine.open(), vocab = model->config.vocab;
    REQUIRE(engine.prefill(slot, test_text(30, vocab, 1), false, {}) == Fit::ok);
    REQUIRE(engine.prefill(slot, test_text(21, vocab, 2), true, {}) == Fit::ok);
    there.skip(1), here.skip(1);
    for (const int token : {3, 1, 4, 1}) REQUIRE(engine.step({slot}, {&token, 1}, {}) == Fit::ok);
    engine.close(slot);
  }

  std::shared_ptr<Model> model = fresh_tiny_model("llama-gqa3", DType::bf16, Device::cuda);
  Engine engine;
  Shadow there{*model, 8, 96, {.beside = &engine.store()}},
      here{*model, 8, 96, {.beside = &engine.store(), .on_host = true}};
  HostCopy copy;
};

void check_equal(const Shadow::Rows& a, const Shadow::Rows& b, std::size_t rows) {
  REQUIRE(a.mass.size() == rows);
  REQUIRE(b.mass.size() == rows);
  for (std::size_t i = 0; i < rows; ++i) {
    CAPTURE(i);
    CHECK(a.mass[i] == Approx(b.mass[i]).margin(0.01));
    CHECK(a.page_recall[i] == b.page_recall[i]);
    CHECK(a.output_error[i] == Approx(b.output_error[i]).margin(0.02));
  }
}

}  // namespace

TEST_CASE("cuda fidelity: a copy on the device gives the figures of a copy on the host") {
  Both both(std::make_shared<TokenReader>(7));
  REQUIRE(both.there.reads_of_prompt() == EngineObserver::Prompt::in_place);
  const auto rows = 3 * static_cast<std::size_t>(both.model->config.layers);  // of four steps one is skipped
  both.run();
  const Shadow::Rows first = both.there.take();
  check_equal(first, both.here.take(), rows);
  CHECK(std::ranges::any_of(first.mass, [](float mass) { return mass < 0.9f; }));

  both.there.reset(), both.here.reset();  // another sequence in the same copies
  both.run();
  const Shadow::Rows second = both.there.take();
  check_equal(second, both.here.take(), rows);
  CHECK(second.mass == first.mass);
  CHECK(second.output_error == first.output_error);
}

TEST_CASE("cuda fidelity: a copy on the device can be saved and goes on from there") {
  Both both(std::make_shared<TokenReader>(7));
  const int vocab = both.model->config.vocab, slot = both.engine.open(), token = 3;
  REQUIRE(both.engine.prefill(slot, test_text(40, vocab, 1), true, {}) == Fit::ok);
  const std::vector<std::byte> saved = both.there.save();
  REQUIRE(both.engine.step({slot}, {&token, 1}, {}) == Fit::ok);
  const Shadow::Rows first = both.there.take();
  both.there.reset();
  REQUIRE(both.there.restore(saved) == Fit::ok);
  CHECK(both.there.save() == saved);
  REQUIRE(first.mass.size() == static_cast<std::size_t>(both.model->config.layers));

  // The same step of the same prompt after a restore gives the same figures.
  both.engine.close(slot);
  const int again = both.engine.open();
  both.there.reset(), both.here.reset();
  REQUIRE(both.engine.prefill(again, test_text(40, vocab, 1), true, {}) == Fit::ok);
  both.there.reset();
  REQUIRE(both.there.restore(saved) == Fit::ok);
  both.there.skip(-1);  // no step to leave out
  REQUIRE(both.engine.step({again}, {&token, 1}, {}) == Fit::ok);
  CHECK(both.there.take().mass == first.mass);
}

TEST_CASE("cuda fidelity: keys that are rotated by their place in the cache are copied on the host") {
  Both both(std::make_shared<OtherRegime>());
  CHECK(both.there.reads_of_prompt() == EngineObserver::Prompt::keys_and_values);
}
