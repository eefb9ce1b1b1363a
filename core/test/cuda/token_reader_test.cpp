// A policy that attends to tokens, on CUDA: compared with itself on the CPU, and rows together with rows alone.
#include "support/token_reader.hpp"

#include <catch2/catch.hpp>

#include "support/contract.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

// Logits of four steps after prompts of these lengths, [step, row].
Logits run(Device device, int newest, const std::vector<int>& prompts, bool batch_invariant) {
  const auto model = fresh_tiny_model("llama-gqa3", DType::bf16, device);
  EngineOptions o;
  o.device = device;
  o.slots = static_cast<int>(prompts.size());
  o.max_tokens = 96;
  o.page_size = 8;
  o.batch_invariant = batch_invariant;
  Engine engine(model, std::make_shared<TokenReader>(newest), o);
  const int vocab = model->config.vocab;
  std::vector<std::int32_t> slots;
  for (const int n : prompts) {
    slots.push_back(engine.open());
    REQUIRE(engine.prefill(slots.back(), test_text(n, vocab, static_cast<unsigned>(n)), true, {}) == Fit::ok);
  }
  Logits all;
  std::vector<float> out(slots.size() * static_cast<std::size_t>(vocab));
  for (const int token : {3, 1, 4, 1}) {
    const std::vector<int> tokens(slots.size(), token);
    REQUIRE(engine.step(slots, tokens, View<float, 2>::dense(out.data(), {std::ssize(slots), vocab})) == Fit::ok);
    for (std::size_t r = 0; r < slots.size(); ++r) {
      const auto begin = out.begin() + static_cast<std::ptrdiff_t>(r) * vocab;
      all.emplace_back(begin, begin + vocab);
    }
  }
  CHECK((engine.fired() > 0) == (newest < 64));
  engine.store().check_invariants();
  return all;
}

}  // namespace

TEST_CASE("cuda engine: attention over tokens gives the CPU's logits") {
  for (const int newest : {7, 64}) {
    CAPTURE(newest);
    CHECK(worst(run(Device::cuda, newest, {50, 13}, false), run(Device::cpu, newest, {50, 13}, false)) < 0.05);
  }
}

TEST_CASE("cuda engine: attention over tokens of a row does not depend on the other rows") {
  const Logits both = run(Device::cuda, 7, {50, 13}, true), one = run(Device::cuda, 7, {13}, true);
  for (std::size_t step = 0; step < one.size(); ++step) CHECK(both[2 * step + 1] == one[step]);
}
