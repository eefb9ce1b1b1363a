#include <numeric>

#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

using Settings = std::map<std::string, ParamValue>;
using Counts = std::vector<std::int32_t>;

Counts divided(const Settings& params, const Division& d) {
  static Registry registry;
  const PluginInfo& info = registry.require(Role::budget, "zigzagkv");
  return create<Budget>(info, resolve(info, params))->divide(d);
}

Division division(int tokens, const std::vector<float>& needs, int length, int kv_heads = 1) {
  Division d;
  d.layers = static_cast<int>(needs.size()) / kv_heads, d.kv_heads = kv_heads, d.tokens = tokens;
  d.measured = needs;
  d.length.assign(needs.size(), length);
  return d;
}

}  // namespace

TEST_CASE("zigzagkv: budgets of layers by hand") {
  CHECK(divided({}, division(100, {10, 20, 30, 40}, 1000)) == Counts{52, 84, 116, 148});
  // Of 148 tokens the last layer has room for 120. Its 28 go to the others, and the third has room for 4.
  CHECK(divided({}, division(100, {10, 20, 30, 40}, 120)) == Counts{64, 96, 120, 120});
  CHECK(divided({{"floor", 1.}}, division(100, {10, 20, 30, 40}, 1000)) == Counts{100, 100, 100, 100});
  // 4 / 3 of 7 and 2 / 3 of 7: 9.33 and 4.67, so the last token goes to the second layer.
  CHECK(divided({{"floor", 0.}}, division(7, {2, 1}, 100)) == Counts{9, 5});
  // 20 tokens of the first layer would be below its pins.
  Division pinned = division(100, {0, 10}, 1000);
  pinned.pinned = 32;
  CHECK(divided({}, pinned) == Counts{32, 168});
  pinned.tokens = 10;  // pins stay even where they exceed the budget, and a short head keeps what it has
  CHECK(divided({}, pinned) == Counts{32, 32});
  pinned.length = {20, 1000};
  CHECK(divided({}, pinned) == Counts{20, 32});
}

TEST_CASE("zigzagkv: heads of a layer keep the same number, or what each needs") {
  // Means 20 and 30: 0.2 * 50 + 40 * 2 * 0.4 and * 0.6.
  const Division d = division(50, {10, 30, 15, 45}, 1000, 2);
  CHECK(divided({}, d) == Counts{42, 42, 58, 58});
  CHECK(divided({{"each_head", true}}, d) == Counts{21, 63, 29, 87});
  CHECK(divided({{"each_head", true}}, division(10, {0, 0, 5, 5}, 100, 2)) == Counts{2, 2, 18, 18});
}

TEST_CASE("zigzagkv refuses scores that are no shares of attention where the budget binds") {
  const auto refusal = Catch::Contains(
      "got a scorer whose scores are all 0 or below with the split zigzagkv, wanted scores that are shares of "
      "attention, e.g. of snapkv");
  const Settings window{{"window_counts", true}}, uniform{{"floor", 1.}};
  CHECK_THROWS_WITH(divided({}, division(10, {0, 0}, 11)), refusal);
  CHECK(divided({}, division(10, {0, 0}, 10)) == Counts{10, 10});
  CHECK(divided({}, division(10, {0, 1}, 100)) == Counts{2, 18});
  CHECK(divided(uniform, division(10, {0, 0}, 100)) == Counts{10, 10});
  CHECK_THROWS_WITH(divided({{"floor", 1.}, {"each_head", true}}, division(10, {0, 0}, 100)), refusal);
  // Of two numbers the second is the need without the window.
  Division two = division(10, {3, 0, 3, 0}, 100);
  two.layers = 2, two.length = {100, 100};
  CHECK_THROWS_WITH(divided(window, two), refusal);
  two.measured = {1, 2, 3, 2};
  CHECK(divided(window, two) == Counts{6, 14});
  // Where pins fill the budget there is nothing to divide.
  Division pinned = division(10, {0, 0}, 100);
  pinned.pinned = 10;
  CHECK(divided({}, pinned) == Counts{10, 10});

  for (const bool window_counts : {false, true}) {
    CAPTURE(window_counts);
    const OnText::Split split{"zigzagkv", {{"window_counts", window_counts}}};
    OnText run(Role::scorer, "knorm", {}, 40, 154, 16, OnText::MakeProfile(), split);
    CHECK_THROWS_WITH(run.prefill(150), refusal);
    OnText short_prompt(Role::scorer, "knorm", {}, 40, 154, 16, OnText::MakeProfile(), split);
    short_prompt.prefill(40);
    CHECK(short_prompt.kept(1, 0).size() == 40);
  }
}

// Shares .5, .3, .15 and .05 of two queries before a window of two. The window's tokens have .5 + 1 of a mean of 1.
TEST_CASE("zigzagkv: the need of the card's shares by hand, with the window and without it") {
  PagedFixture cache({1, 1, 8, 4, 4});
  for (int t = 0; t < 6; ++t) cache.append(0, 0, std::vector<float>(8), std::vector<float>(8));
  const PagedKv pages = cache.view();
  Shape shape;
  shape.layers = shape.max_slots = shape.query_heads = shape.kv_heads = 1;
  shape.head_dim = 8, shape.page_size = 4, shape.max_tokens = 16;
  HeapWorkspace workspace;
  LayerKv kv;
  kv.shape = &shape, kv.pages = pages, kv.workspace = &workspace, kv.max_length = 6;
  std::vector<float> votes{1, .6f, .3f, .1f, 0, 0};
  const auto need = [&](double mass, bool window_counts, int first = 0) {
    static Registry registry;
    const PluginInfo& info = registry.require(Role::budget, "zigzagkv");
    float out[] = {-1, -1};
    create<Budget>(info, resolve(info, {{"mass", mass}, {"window_counts", window_counts}}))
        ->measure(kv, Scores::dense(votes.data(), {1, 1, 6}), {.first = first, .last = 2},
                  View<float, 3>::dense(out, {1, 1, 2}), Stream::cpu());
    if (window_counts) CHECK((out[1] > 0) == (votes[0] > 0));
    return out[0];
  };
  CHECK(need(.9, false) == 3);
  CHECK(need(.9, true) == 4);   // 3 + .5 + .3 of 4 reach 3.6
  CHECK(need(.87, true) == 3);  // 3 + .5 reach 3.48
  CHECK(need(.7, true) == 2);
  CHECK(need(.7, true, 1) == 3);  // the first token is pinned: 3 x 1.3 of 4.4, where two have 2.6
  CHECK(votes == std::vector<float>{1, .6f, .3f, .1f, 0, 0});
  votes = std::vector<float>(6);
  CHECK(need(.9, true) == 2);
  CHECK(need(.4, true) == 1);
}

TEST_CASE("zigzagkv with snapkv keeps on real text what a plain implementation keeps") {
  constexpr int prompt = 150, budget = 40, window = 8;
  for (const auto& [each_head, window_counts] :
       {std::pair{false, false}, std::pair{true, false}, std::pair{true, true}}) {
    OnText run(Role::scorer, "snapkv", {{"window", std::int64_t{window}}, {"clustering", false}}, budget, prompt + 4,
               16, OnText::MakeProfile(),
               OnText::Split{"zigzagkv", {{"each_head", each_head}, {"mass", .8}, {"window_counts", window_counts}}});
    run.prefill(prompt);
    const int layers = run.config().layers, heads = run.config().kv_heads;
    std::vector<std::vector<double>> votes;  // [layer, head]
    std::vector<double> needs;
    for (int i = 0; i < layers * heads; ++i) {
      std::vector<double> sum(prompt - window);
      for (int g = 0; g < run.group(); ++g)
        for (const auto& row : window_shares(run, i / heads, i % heads * run.group() + g, prompt, window))
          for (std::size_t t = 0; t < sum.size(); ++t) sum[t] += row[t] / run.group();
      std::vector<double> ordered = sum;
      if (window_counts) ordered.insert(ordered.end(), window, *std::max_element(sum.begin(), sum.end()) + window);
      std::sort(ordered.rbegin(), ordered.rend());
      const double all = std::accumulate(ordered.begin(), ordered.end(), 0.);
      int need = 0;
      for (double got = 0; got < .8f * all; ++need) got += ordered[static_cast<std::size_t>(need)];
      votes.push_back(sum), needs.push_back(need);
    }
    const double all = std::accumulate(needs.begin(), needs.end(), 0.);
    int kept = 0;
    for (int layer = 0; layer < layers; ++layer) {
      double of_layer = 0;
      for (int h = 0; h < heads; ++h) of_layer += needs[static_cast<std::size_t>(layer * heads + h)];
      const double exact = .2 * budget + .8 * budget * layers * of_layer / all;
      int in_layer = 0;
      for (int h = 0; h < heads; ++h) {
        CAPTURE(each_head, window_counts, layer, h, exact);
        const auto at = static_cast<std::size_t>(layer * heads + h);
        const std::vector<int> got = run.kept(layer, h);
        in_layer += static_cast<int>(got.size());
        if (!each_head) CHECK(std::abs(static_cast<double>(got.size()) - exact) < 1.001);
        // Which ones: the best of so many, and the window.
        auto wanted = best(votes[at], positions_to(prompt - window), got.size() - window);
        for (int t = prompt - window; t < prompt; ++t) wanted.push_back(t);
        CHECK(got == wanted);
        CHECK(got.size() >= window);
        for (int other = 0; each_head && other < heads; ++other)
          if (needs[static_cast<std::size_t>(layer * heads + other)] > needs[at])
            CHECK(run.kept(layer, other).size() >= got.size());
      }
      CHECK(std::abs(in_layer - exact * heads) < heads + .01);
      kept += in_layer;
    }
    CHECK(kept == layers * heads * budget);
    run.step();
    CHECK(run.kept(0, 0).back() == prompt);  // nothing leaves while decoding
  }
}
