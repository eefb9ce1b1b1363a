#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr int prompt = 203, steps = 30, sinks = 5, window = 30, page_size = 8, tokens = 48;

float gate(int layer, int head) { return static_cast<float>((layer * 7 + head * 5) % 11) / 10; }

Profile gates(int layers, int kv_heads) {
  ProfileArray array{{layers, kv_heads}, {}, ""};
  for (int l = 0; l < layers; ++l)
    for (int h = 0; h < kv_heads; ++h) array.values.push_back(gate(l, h));
  return {{"gate", array}};
}

OnText on_text(std::map<std::string, ParamValue> given, const OnText::MakeProfile& make = gates, int budget = 0) {
  given.insert({{"sinks", std::int64_t{sinks}}, {"window", std::int64_t{window}}, {"tokens", std::int64_t{tokens}}});
  return OnText(Role::policy, "lserve", given, budget, prompt + steps, page_size, make);
}

// The score of each group of `parts` pages is that of its best page: the last group may have fewer.
std::vector<double> of_groups(const std::vector<double>& pages, int parts) {
  std::vector<double> most;
  for (std::size_t p = 0; p < pages.size(); ++p)
    if (p % static_cast<std::size_t>(parts) == 0)
      most.push_back(pages[p]);
    else
      most.back() = std::max(most.back(), pages[p]);
  return most;
}

// The pages of the newest group and of the best others, by their bounds for the query at `position`. The card's 64
// pages of four parts are 63 and the newest one in the same way.
std::set<int> choice(const OnText& run, int layer, int head, int position, int parts, int amount = tokens) {
  const auto& seen = run.layer(layer);
  const auto bounds =
      page_bounds(seen.queries, seen.keys, static_cast<std::size_t>(position), head, run.group(), page_size);
  std::vector<double> most(bounds[0].size(), -INFINITY);
  for (const auto& of_query : bounds)
    for (std::size_t i = 0; i < most.size(); ++i) most[i] = std::max(most[i], of_query[i]);
  std::vector<double> groups = of_groups(most, parts);
  groups.back() = INFINITY;
  const int all = static_cast<int>(groups.size()), some = amount / (page_size * parts);
  const auto chosen =
      best(groups, positions_to(all), static_cast<std::size_t>(position <= amount ? all : std::min(some, all)));
  std::set<int> pages;
  for (const int g : chosen)
    for (int p = g * parts; p < std::min(static_cast<int>(most.size()), (g + 1) * parts); ++p) pages.insert(p);
  return pages;
}

// Half of the heads: those that fewer than half of all come before.
bool retrieval(const OnText& run, int layer, int head) {
  const int layers = run.config().layers, heads = run.config().kv_heads;
  int before = 0;
  for (int l = 0; l < layers; ++l)
    for (int h = 0; h < heads; ++h)
      before +=
          gate(l, h) > gate(layer, head) || (gate(l, h) == gate(layer, head) && l * heads + h < layer * heads + head);
  return before < layers * heads - static_cast<int>(std::ceil(.5 * (layers * heads - 1)));
}

std::vector<int> streamed(int seen) {
  std::vector<int> kept;
  for (int p = 0; p < seen; ++p)
    if (p < sinks || p >= seen - window) kept.push_back(p);
  return kept;
}

}  // namespace

TEST_CASE("lserve: the plain implementation gives the card's scores") {
  CHECK(of_groups({1, 9, 5, 6}, 2) == std::vector<double>{9, 6});
  CHECK(of_groups({1, 9, 5}, 2) == std::vector<double>{9, 5});
}

TEST_CASE("lserve keeps and reads on real text what a plain implementation does") {
  const auto [parts, every] = GENERATE(std::pair{2, 4}, std::pair{3, 8}, std::pair{1, 2}, std::pair{2, 1});
  CAPTURE(parts, every);
  OnText run = on_text({{"choose_every", std::int64_t{every}}, {"parts", std::int64_t{parts}}});
  run.prefill(prompt);
  std::map<std::pair<int, int>, std::set<int>> chosen;
  int streaming = 0, left_out = 0, finer = 0;
  for (int step = 0; step < steps; ++step) {
    run.step();
    const int position = prompt + step;
    for (int layer = 0; layer < run.config().layers; ++layer)
      for (int head = 0; head < run.config().kv_heads; ++head) {
        CAPTURE(step, layer, head);
        std::vector<int> read = run.layer(layer).read[static_cast<std::size_t>(step)][static_cast<std::size_t>(head)];
        if (!retrieval(run, layer, head)) {
          ++streaming;
          CHECK(run.kept(layer, head) == streamed(position + 1));
          CHECK(read == positions_to((sinks + window + 1 + page_size - 1) / page_size));  // and the step's token
          continue;
        }
        CHECK(run.kept(layer, head) == positions_to(position + 1));
        // The first step chooses, and those whose token begins a period of the text.
        auto& last = chosen[{layer, head}];
        if (step == 0 || position % every == 0) last = choice(run, layer, head, position, parts);
        CHECK(read == std::vector<int>(last.begin(), last.end()));
        CHECK(read.back() == position / page_size);
        CHECK(read.size() <= tokens / page_size);
        left_out += static_cast<int>(read.size()) <= position / page_size;
        finer += step == 0 && last != choice(run, layer, head, position, 1);
      }
  }
  CHECK(left_out > 0);
  CHECK((finer > 0) == (parts > 1));
  CHECK(streaming == steps * run.config().layers * run.config().kv_heads / 2);
}

TEST_CASE("lserve: without reuse each step chooses, and a text within the amount is read as a whole") {
  OnText each = on_text({{"reuse", false}, {"parts", std::int64_t{2}}});
  each.prefill(prompt);
  each.step();
  each.step();
  OnText all = on_text({{"tokens", std::int64_t{4096}}});
  all.prefill(prompt);
  all.step();
  for (int layer = 0; layer < each.config().layers; ++layer)
    for (int head = 0; head < each.config().kv_heads; ++head) {
      if (!retrieval(each, layer, head)) continue;
      CAPTURE(layer, head);
      const auto wanted = choice(each, layer, head, prompt + 1, 2);
      CHECK(each.layer(layer).read[1][static_cast<std::size_t>(head)] ==
            std::vector<int>(wanted.begin(), wanted.end()));
      CHECK(all.layer(layer).read[0][static_cast<std::size_t>(head)] == positions_to(prompt / page_size + 1));
    }
}

// The card's history of 4096 tokens gives all 65 pages.
TEST_CASE("lserve: a text of just the amount is read with the page that opens behind it") {
  OnText run = on_text({{"choose_every", std::int64_t{4}}, {"parts", std::int64_t{2}}});
  run.prefill(tokens - 1);
  for (int step = 0; step < 6; ++step) run.step();
  int retrieving = 0;
  for (int layer = 0; layer < run.config().layers; ++layer)
    for (int head = 0; head < run.config().kv_heads; ++head) {
      if (!retrieval(run, layer, head)) continue;
      const auto& read = run.layer(layer).read;
      const auto at = [&](std::size_t step) { return read[step][static_cast<std::size_t>(head)]; };
      ++retrieving;
      CHECK(at(0) == positions_to(tokens / page_size));
      for (const std::size_t step : {1, 2, 3, 4}) CHECK(at(step) == positions_to(tokens / page_size + 1));
      CHECK(at(5).size() == tokens / page_size - 1);  // three groups, of which the newest has one page
    }
  CHECK(retrieving > 0);
}

TEST_CASE("lserve: no retrieval heads, and what it cannot obey") {
  OnText run = on_text({{"retrieval_heads", false}, {"parts", std::int64_t{2}}}, {});
  run.prefill(prompt);
  run.step();
  CHECK(run.kept(0, 0) == streamed(prompt + 1));
  CHECK_THROWS_WITH(on_text({{"choose_every", std::int64_t{3}}, {"parts", std::int64_t{1}}}),
                    Catch::Contains("got choose_every 3, wanted a divisor of the page size 8"));
  CHECK_THROWS_WITH(on_text({{"choose_every", std::int64_t{16}}, {"parts", std::int64_t{1}}}),
                    Catch::Contains("got choose_every 16, wanted a divisor of the page size 8"));
  CHECK_THROWS_WITH(
      on_text({}),
      Catch::Contains("got tokens 48, wanted at least 2 groups of 32, one of them the newest: 4 pages of 8"));
  CHECK_THROWS_WITH(on_text({{"parts", std::int64_t{0}}}), Catch::Contains("parts"));
  CHECK_THROWS_WITH(on_text({{"parts", std::int64_t{1}}, {"prompt_window", std::int64_t{29}}}),
                    Catch::Contains("got prompt_window 29, wanted 0 or at least the window of 30"));
  CHECK_THROWS_WITH(on_text({{"parts", std::int64_t{1}}}, gates, 64),
                    Catch::Contains("got a budget for a policy that decides by itself"));
}
