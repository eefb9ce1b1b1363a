#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr int page = 8, prompt = 200, steps = 20, most_tokens = 96, sinks = 10, window = 14;
constexpr std::size_t selected = (most_tokens - sinks - window) / page;

// The best pages that hold neither a sink nor a token of the window.
std::vector<int> best_pages(const OnText& run, int layer, int head, int position) {
  const auto& seen = run.layer(layer);
  const auto bounds = page_bounds(seen.queries, seen.keys, static_cast<std::size_t>(position), head, run.group(), page);
  const int first = (sinks + page - 1) / page, last = (position + 1 - window) / page;
  std::vector<double> score(static_cast<std::size_t>(last - first));
  for (const auto& of_query : bounds) {
    const auto share = softmax({of_query.begin() + first, of_query.begin() + last});
    for (std::size_t i = 0; i < score.size(); ++i) score[i] += share[i] / run.group();
  }
  std::vector<int> pages;
  for (int p = first; p < last; ++p) pages.push_back(p);
  return best(score, pages, selected);
}

double cosine(const OnText& run, int layer, int head, int position) {
  const auto& q = run.layer(layer).queries.at;
  double sum = 0;
  for (int g = head * run.group(); g < (head + 1) * run.group(); ++g) {
    const auto &a = q[static_cast<std::size_t>(position)][static_cast<std::size_t>(g)],
               &b = q[static_cast<std::size_t>(position) - 1][static_cast<std::size_t>(g)];
    sum += dot(a, b) / std::sqrt(dot(a, a) * dot(b, b));
  }
  return sum / run.group();
}

std::set<int> with_pins(const std::vector<int>& pages, int position) {
  std::set<int> all(pages.begin(), pages.end());
  for (int p = 0; p * page < sinks; ++p) all.insert(p);
  for (int p = (position + 1 - window) / page; p <= position / page; ++p) all.insert(p);
  return all;
}

std::map<std::string, ParamValue> params(std::map<std::string, ParamValue> more) {
  more["sinks"] = std::int64_t{sinks}, more["window"] = std::int64_t{window};
  return more;
}

}  // namespace

TEST_CASE("freekv reads on real text what a plain implementation reads, with and without its components") {
  const auto [speculation, threshold] = GENERATE(std::pair{true, .7}, std::pair{true, -2.}, std::pair{false, .7});
  CAPTURE(speculation, threshold);
  auto given = params({{"speculation", speculation}});
  if (threshold < -1)
    given["correction"] = false;
  else
    given["threshold"] = threshold;
  OnText run(Role::policy, "freekv", given, most_tokens, prompt + steps, page);
  run.prefill(prompt);
  int turned = 0, calm = 0;
  for (int step = 0; step < steps; ++step) {
    run.step();
    const int position = prompt + step;
    for (int layer = 0; layer < run.config().layers; ++layer)
      for (int head = 0; head < run.config().kv_heads; ++head) {
        CAPTURE(step, layer, head);
        const auto& read = run.layer(layer).read[static_cast<std::size_t>(step)];
        if (layer == 0) {
          CHECK(read.empty());  // the dense layer
          continue;
        }
        // The first step has no query before it, so every head has turned.
        const bool flagged = step == 0 || cosine(run, layer, head, position) < threshold;
        const bool corrects = !speculation || (threshold >= -1 && flagged);
        (corrects ? turned : calm) += 1;
        const auto wanted = with_pins(best_pages(run, layer, head, corrects ? position : position - 1), position);
        const auto& got = read[static_cast<std::size_t>(head)];
        CHECK(std::set<int>(got.begin(), got.end()) == wanted);
        // After the step the pages of this step's query are there, for the next one.
        const auto device = run.pages_on(Tier::device, layer, head);
        CHECK(std::set<int>(device.begin(), device.end()) ==
              with_pins(best_pages(run, layer, head, position), position));
      }
  }
  if (speculation && threshold > 0) CHECK((turned > 20 && calm > 20));
}

// The paper's setting: 16 pages of sinks, 32 selected and 16 of the window.
TEST_CASE("freekv: a budget pays for sinks, window and selected pages") {
  CHECK_THROWS_WITH(OnText(Role::policy, "freekv", params({}), sinks + window + page - 1, 64, page),
                    Catch::Contains("wanted at least 32"));
  LayerKv kv;
  const std::int32_t budgets[] = {2048, 2048}, slots[] = {0, 1};
  kv.pages.rows = 2, kv.pages.kv_heads = 1, kv.pages.page_size = 32, kv.pages.slots = slots;
  kv.budget = budgets;
  const ops::PageCounts pages = ops::budget_pages(kv, [](int tokens) { return tokens - 512 - 512; });
  CHECK(pages.same == 32);
  CHECK_FALSE(pages.each);
}
