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

// The newest page and the best others, by their bounds for the query at `position`. The card's 64 pages are 63 and the
// newest one in the same way.
std::set<int> choice(const OnText& run, int layer, int head, int position, int pages) {
  const auto& seen = run.layer(layer);
  const auto bounds =
      page_bounds(seen.queries, seen.keys, static_cast<std::size_t>(position), head, run.group(), page_size);
  std::vector<double> most = bounds[0];
  for (const auto& of_query : bounds)
    for (std::size_t i = 0; i < most.size(); ++i) most[i] = std::max(most[i], of_query[i]);
  most.back() = INFINITY;
  const int all = static_cast<int>(most.size());
  const auto chosen = best(most, positions_to(all), static_cast<std::size_t>(std::min(pages, all)));
  return {chosen.begin(), chosen.end()};
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

TEST_CASE("lserve keeps and reads on real text what a plain implementation does") {
  const int every = GENERATE(4, 3, 1);
  CAPTURE(every);
  OnText run = on_text({{"choose_every", std::int64_t{every}}});
  run.prefill(prompt);
  std::map<std::pair<int, int>, std::set<int>> chosen;
  int opened = 0, streaming = 0;
  for (int step = 0; step < steps; ++step) {
    run.step();
    const int position = prompt + step, newest = position / page_size;
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
        auto& last = chosen[{layer, head}];
        if (step % every == 0) last = choice(run, layer, head, position, tokens / page_size - (every > 1));
        std::set<int> wanted = last;
        opened += wanted.insert(newest).second;
        CHECK(read == std::vector<int>(wanted.begin(), wanted.end()));
        CHECK(read.size() <= tokens / page_size);
      }
  }
  CHECK((opened > 0) == (every > 1));  // a page opens between choices
  CHECK(streaming == steps * run.config().layers * run.config().kv_heads / 2);
}

TEST_CASE("lserve: without reuse each step chooses, and a text within the amount is read as a whole") {
  OnText each = on_text({{"reuse", false}});
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
      const auto wanted = choice(each, layer, head, prompt + 1, tokens / page_size);
      CHECK(each.layer(layer).read[1][static_cast<std::size_t>(head)] ==
            std::vector<int>(wanted.begin(), wanted.end()));
      CHECK(all.layer(layer).read[0][static_cast<std::size_t>(head)] == positions_to(prompt / page_size + 1));
    }
}

TEST_CASE("lserve: no retrieval heads, and what it cannot obey") {
  OnText run = on_text({{"retrieval_heads", false}}, {});
  run.prefill(prompt);
  run.step();
  CHECK(run.kept(0, 0) == streamed(prompt + 1));
  CHECK_THROWS_WITH(on_text({{"logical_page", std::int64_t{4}}}),
                    Catch::Contains("got logical_page 4, wanted 0 or 8, the page size: core keeps no summaries"));
  CHECK_NOTHROW(on_text({{"logical_page", std::int64_t{page_size}}}));
  CHECK_THROWS_WITH(on_text({{"choose_every", std::int64_t{9}}}),
                    Catch::Contains("got choose_every 9, wanted at most 8"));
  CHECK_THROWS_WITH(on_text({{"tokens", std::int64_t{15}}}),
                    Catch::Contains("got tokens 15, wanted at least 2 pages of 8"));
  CHECK_THROWS_WITH(on_text({}, gates, 64), Catch::Contains("got a budget for a policy that decides by itself"));
}
