// Requests that are served together, under a cap that preempts some of them, have the texts that they have alone:
// with every policy, and with its pages on the host.
#include <catch2/catch.hpp>

#include "engine/scheduler.hpp"
#include "support/contract.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr int tokens_kept = 48;

std::vector<Request> requests(int vocab) {
  std::vector<Request> out;
  for (int i = 0; i < (quick() ? 5 : 8); ++i) {
    Request r;
    r.prompt = test_text(9 + 17 * (i % 5), vocab, static_cast<unsigned>(i) + 1);
    if (i % 3 == 0) r.fed = test_text(2, vocab, static_cast<unsigned>(i) + 50);
    r.max_new = 20 + 8 * (i % 3);
    out.push_back(std::move(r));
  }
  return out;
}

struct Outcome {
  std::vector<std::vector<int>> texts;
  int preemptions = 0;
};

Outcome serve(const PolicySpec& spec, const std::vector<Request>& all, int slots, std::int64_t limit) {
  const auto model = tiny_model("llama-gqa3");
  EngineOptions o;
  o.device = contract_device();
  o.slots = slots;
  o.max_tokens = 128;
  o.page_size = spec.page_size;
  o.budget = spec.budget;
  o.device_limit = limit;
  Engine engine(model, subjects().policy(spec), o);
  Scheduler scheduler(engine, all, {});
  for (int left = 5000; !scheduler.done(); --left) {
    REQUIRE(scheduler.iterate() == Fit::ok);
    REQUIRE(left > 0);
    if (limit >= 0) REQUIRE(engine.store().page_bytes(Tier::device) <= limit);
  }
  CHECK(engine.store().page_bytes(Tier::device) == 0);
  engine.store().check_invariants();
  Outcome out;
  for (const Served& s : scheduler.served()) {
    out.texts.push_back(s.tokens);
    out.preemptions += s.preemptions;
  }
  return out;
}

// Just enough for the longest request alone, with a spare page of each head.
std::int64_t least(const PolicySpec& spec, const std::vector<Request>& all) {
  const auto model = tiny_model("llama-gqa3");
  EngineOptions o;
  o.device = contract_device();
  o.max_tokens = 128;
  o.page_size = spec.page_size;
  o.budget = spec.budget;
  const Engine engine(model, subjects().policy(spec), o);
  std::size_t longest = 0;
  for (const Request& r : all)
    longest = std::max(longest, r.prompt.size() + r.fed.size() + static_cast<std::size_t>(r.max_new));
  return engine.full_bytes(static_cast<int>(longest)) + engine.full_bytes(1);
}

}  // namespace

TEST_CASE("served together under a cap, every request has the text that it has alone") {
  const auto all = requests(tiny_model("llama-gqa3")->config.vocab);
  std::vector<PolicySpec> specs{full_spec()};
  for (const Subject& s : subjects().list()) specs.push_back(with_budget(s.spec, BudgetAmount::tokens, tokens_kept));
  int evicting = 0, preempted = 0;  // runs of policies that evict
  for (const PolicySpec& spec : specs) {
    for (const bool host : {false, true}) {
      CAPTURE(spec.name, host);
      PolicySpec placed = spec;
      if (host && (spec.policy || (on_cuda() && spec.codec))) continue;
      if (host) placed.placement.tier = Tier::host;
      const Outcome alone = serve(placed, all, 1, -1);
      const Outcome together = serve(placed, all, 6, least(placed, all));
      CHECK(together.texts == alone.texts);
      if (!host && !spec.scorer && !spec.policy) CHECK(together.preemptions > 0);
      evicting += spec.scorer || spec.policy;
      preempted += (spec.scorer || spec.policy) && together.preemptions > 0;
    }
  }
  if (evicting > 2) CHECK(preempted > 0);  // of a library's one policy all requests may fit
}
