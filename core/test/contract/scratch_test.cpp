// Under a cap of the device's memory a callback gets the scratch that its policy declares, and no more.
#include <catch2/catch.hpp>

#include "support/contract.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

// One sequence that fills its memory: the cap is for as many tokens as it may hold. A budget of more than half of the
// prompt lets a method keep all tokens of half the heads.
const int most_tokens = quick() ? 512 : 1024, steps = 3, limit = most_tokens * 5 / 8;

// Every scorer with every split that takes its scores, and what else the suite runs.
std::vector<PolicySpec> specs() {
  std::vector<PolicySpec> all, scorers, splits;
  for (const Subject& s : about_all()) {
    const bool alone = !s.spec.split && !s.spec.codec;
    if (s.spec.scorer && s.spec.split && !s.spec.codec) {
      const auto same = [&](const PolicySpec& other) { return other.split->name == s.spec.split->name; };
      if (std::none_of(splits.begin(), splits.end(), same)) splits.push_back(s.spec);
    } else {
      (s.spec.scorer && alone ? scorers : all).push_back(s.spec);
    }
  }
  for (const PolicySpec& scorer : scorers) {
    all.push_back(scorer);
    for (const PolicySpec& split : splits) {
      if (!subjects().go_together(scorer, split)) continue;
      all.push_back(scorer);
      all.back().split = split.split;
      if (all.back().profile.empty()) all.back().profile = split.profile;
      all.back().name += "+" + split.split->name;
      if (!subjects().refused_scores(all.back()).empty()) all.pop_back();
    }
  }
  return all;
}

}  // namespace

TEST_CASE("a callback takes no more scratch than its policy declares", "[cpu]") {
  if (skip_on_cuda()) return;
  if (about_all().empty()) return;
  // Scores of KV heads take as much as those of query heads where each group has one.
  for (const std::string& name : quick() ? std::vector<std::string>{"llama-mha"} : group_models()) {
    const auto model = fresh_tiny_model(name, DType::f32);
    model->config.context = most_tokens;
    const auto prompt = test_text(most_tokens - steps, model->config.vocab),
               answer = test_text(steps, model->config.vocab, 5);
    for (PolicySpec spec : specs()) {
      spec = with_budget(spec, BudgetAmount::tokens, limit);
      if (spec.scorer && !subjects().keeps_tokens(spec) && subjects().policy(spec)->needs().window_queries() == 0)
        spec.schedule.every = 1;
      CAPTURE(name, spec.name);
      EngineOptions options;
      options.page_size = spec.page_size;
      options.budget = spec.budget;
      options.recorded = made_up_future();
      options.max_tokens = most_tokens;
      options.scratch_limit = Engine::memory(*model, *subjects().policy(spec, *model), options).scratch_of_callback;
      INFO("usual cause: Needs::scratch_numbers of needs() counts less than the callback takes");
      CHECK_NOTHROW(Play(model, spec, options).run(prompt, answer));
    }
  }
}
