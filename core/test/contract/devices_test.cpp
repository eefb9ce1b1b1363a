// What a policy does on CUDA is what it does on the CPU.
#include <catch2/catch.hpp>

#include "support/contract.hpp"

using namespace kvlab;
using namespace kvlab::test;

TEST_CASE("CUDA keeps and answers what the CPU does") {
  if (!on_cuda()) return;
  constexpr int every = 4;
  int alike = 0;
  for (const std::string& name : group_models()) {
    const auto cuda = tiny_model(name);
    const std::shared_ptr<const Model> cpu = fresh_tiny_model(name, DType::bf16, Device::cpu);
    const auto prompt = test_text(112, cpu->config.vocab), answer = test_text(8, cpu->config.vocab, 101);
    for (const Subject& s : subjects().list())
      for (const bool host : {false, true}) {
        if (host && (s.spec.policy || s.composed())) continue;
        if (s.composed() && name != "llama-gqa3") continue;
        CAPTURE(name, s.label, host);
        PolicySpec spec = with_budget(s.spec, BudgetAmount::tokens, 48);
        if (host) spec.placement.tier = Tier::host, spec.placement.resident = 16;
        if (s.evicts() && subjects().policy(spec)->needs().window_queries() == 0) spec.schedule.every = every;
        Play there(cuda, spec), here(cpu, spec);
        const Logits got = there.run(prompt, answer), expected = here.run(prompt, answer);
        // Scores may be closer than bf16 tells apart: then one token stays for another.
        CHECK(overlap(there.kept, here.kept) > 0.9);
        const Kept left = kept_of(there.engine->store(), there.slot), wanted = kept_of(here.engine->store(), here.slot);
        CHECK(overlap(left, wanted) > 0.9);
        if (s.spec.selector || there.kept != here.kept || left != wanted) continue;
        const double tolerance = s.spec.codec ? 0.1 : 0.05;
        const auto first = [](const Logits& l) { return Logits(l.begin(), l.begin() + 1 + every); };
        CHECK(worst(first(got), first(expected)) < tolerance);
        if (!(worst(got, expected) < tolerance)) continue;  // an eviction in between chose otherwise
        ++alike;
        CHECK(there.engine->fired() == here.engine->fired());
        const Ledger &a = there.engine->ledger(), &b = here.engine->ledger();
        CHECK(a.moved_total(Tier::host) == b.moved_total(Tier::host));
        CHECK(a.moved_total(Tier::device) == b.moved_total(Tier::device));
      }
  }
  CHECK(alike > 0);
}
