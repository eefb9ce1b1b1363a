#include <cmath>
#include <numeric>

#include "support/on_text.hpp"
#include "test/model/tiny_files.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

using Settings = std::map<std::string, ParamValue>;
using Counts = std::vector<std::int32_t>;

Instance<Budget> budget_of(const Settings& params) {
  static Registry registry;
  const PluginInfo& info = registry.require(Role::budget, "head_profile");
  return create<Budget>(info, resolve(info, params));
}

Profile weights(int layers, int kv_heads, const std::vector<float>& values, const std::string& name = "gate") {
  return {{name, {{layers, kv_heads}, values, ""}}};
}

// Tokens of each layer's heads, for one sequence of n tokens in layers of two KV heads.
Counts allotted(const std::vector<float>& gates, int total, int n, double floor, Pins pins = {}, int dense_layers = 0) {
  const int layers = static_cast<int>(gates.size()) / 2;
  const auto budget = budget_of({{"floor", floor}});
  budget->load_profile(weights(layers, 2, gates));
  Shape shape;
  shape.layers = layers, shape.kv_heads = 2;
  budget->attach(shape);
  HeapWorkspace workspace;
  LayerKv kv;
  kv.pages.rows = 1, kv.pages.kv_heads = 2;
  kv.workspace = &workspace;
  const std::int32_t seen = n, mean = total;
  kv.position = &seen;
  const Counts length(2, n);
  Counts out, keep(2);
  Allotment a;
  a.layers = layers - dense_layers;
  a.length = View<const std::int32_t, 2>::dense(length.data(), {1, 2});
  a.keep = View<std::int32_t, 2>::dense(keep.data(), {1, 2});
  a.pins = a.host_pins = &pins;
  a.total = a.host_total = &mean;
  a.kv = &kv;
  for (a.layer = 0; a.layer < a.layers; ++a.layer) {
    kv.layer = a.layer + dense_layers;
    budget->allot(a, Stream::cpu());
    out.insert(out.end(), keep.begin(), keep.end());
  }
  return out;
}

}  // namespace

TEST_CASE("head_profile: budgets of heads by hand") {
  // 20 of each 100 stay. 320 more go by tenths.
  CHECK(allotted({1, 2, 3, 4}, 100, 1000, .2) == Counts{52, 84, 116, 148});
  // Of 148 tokens the last head has room for 120. The others share 220 by weight: 36.67, 73.33 and 110, and the third
  // has room for 100 of them. 120 more give 40 and 80.
  CHECK(allotted({1, 2, 3, 4}, 100, 120, .2) == Counts{60, 100, 120, 120});
  CHECK(allotted({1, 2, 3, 4}, 100, 1000, 1) == Counts{100, 100, 100, 100});
  CHECK(allotted({1, 2, 3, 4}, 100, 100, .2) == Counts{100, 100, 100, 100});
  // 4 / 3 of 14 and 2 / 3: the largest remainders get the tokens, and of equal ones the first.
  CHECK(allotted({2, 2, 1, 1}, 7, 100, 0) == Counts{9, 9, 5, 5});
  CHECK(allotted({1, 1, 1, 0}, 1, 100, 0) == Counts{2, 1, 1, 0});
  // Heads without weight get what the others have no room for, the same each.
  CHECK(allotted({1, 0, 0, 0}, 10, 19, 0) == Counts{19, 7, 7, 7});
  CHECK(allotted({0, 0, 0, 0}, 10, 19, 0) == Counts{10, 10, 10, 10});
  // Pins come on top of the shares, even where they exceed the budget.
  CHECK(allotted({1, 2, 3, 4}, 108, 1000, .2, {.first = 2, .last = 6}) == Counts{60, 92, 124, 156});
  CHECK(allotted({1, 2, 3, 4}, 5, 1000, .2, {.last = 8}) == Counts{8, 8, 8, 8});
  CHECK(allotted({9, 9, 1, 2, 3, 4}, 100, 1000, .2, {}, 1) == Counts{52, 84, 116, 148});  // layer 0 is dense
}

TEST_CASE("head_profile: the total is exact, and more weight is never fewer tokens") {
  for (const int total : {1, 2, 7, 33, 99, 100})
    for (const double floor : {0., .1, .2, .7})
      for (const Pins pins : {Pins{}, Pins{.last = 1}}) {
        std::vector<float> gates;
        for (int h = 0; h < 14; ++h) gates.push_back(static_cast<float>((h * 5) % 7 * ((h * 3) % 4)) / 10);
        CAPTURE(total, floor, pins.last);
        const Counts tokens = allotted(gates, total, 100, floor, pins);
        CHECK(std::accumulate(tokens.begin(), tokens.end(), 0) == 14 * total);
        for (std::size_t a = 0; a < gates.size(); ++a) {
          CHECK(tokens[a] <= 100);
          CHECK(tokens[a] >= static_cast<int>((total - pins.last) * floor) + pins.last);
          for (std::size_t b = 0; b < gates.size(); ++b)
            if (gates[a] > gates[b]) CHECK(tokens[a] >= tokens[b]);
        }
      }
}

TEST_CASE("head_profile with snapkv keeps on real text what a plain implementation keeps") {
  constexpr int prompt = 150, budget = 40, window = 8;
  constexpr double floor = .25;
  const auto gate = [](int layer, int head) { return static_cast<float>((layer * 7 + head * 5) % 11) / 10; };
  const auto made = [&](int layers, int heads) {
    std::vector<float> values;
    for (int i = 0; i < layers * heads; ++i) values.push_back(gate(i / heads, i % heads));
    return weights(layers, heads, values, "echo");
  };
  OnText run(Role::scorer, "snapkv", {{"window", std::int64_t{window}}, {"clustering", false}}, budget, prompt + 4, 16,
             made, OnText::Split{"head_profile", {{"weights", std::string("echo")}, {"floor", floor}}});
  run.prefill(prompt);
  const int layers = run.config().layers, heads = run.config().kv_heads;
  // Waterfilling by bisection: floor + level * gate, at most what a head has room for.
  const double low = (budget - window) * floor, most = prompt - window;
  const auto sum_at = [&](double level) {
    double sum = 0;
    for (int i = 0; i < layers * heads; ++i) sum += std::min(most, low + level * gate(i / heads, i % heads));
    return sum;
  };
  double level = 0;
  for (double step = 1e6; step > 1e-9; step /= 2)
    if (sum_at(level + step) <= static_cast<double>(layers * heads * (budget - window))) level += step;
  std::size_t kept = 0;
  bool differ = false;
  for (int layer = 0; layer < layers; ++layer)
    for (int h = 0; h < heads; ++h) {
      const double exact = window + std::min(most, low + level * gate(layer, h));
      CAPTURE(layer, h, exact);
      const std::vector<int> got = run.kept(layer, h);
      CHECK(std::abs(static_cast<double>(got.size()) - exact) < 1.0001);
      kept += got.size(), differ = differ || got.size() != static_cast<std::size_t>(budget);
      std::vector<double> votes(prompt - window);
      for (int g = 0; g < run.group(); ++g)
        for (const auto& row : window_shares(run, layer, h * run.group() + g, prompt, window))
          for (std::size_t t = 0; t < votes.size(); ++t) votes[t] += row[t] / run.group();
      auto wanted = best(votes, positions_to(prompt - window), got.size() - window);
      for (int t = prompt - window; t < prompt; ++t) wanted.push_back(t);
      CHECK(got == wanted);
    }
  CHECK(kept == static_cast<std::size_t>(layers * heads * budget));
  CHECK(differ);
}

TEST_CASE("head_profile holds its heads at their numbers while decoding") {
  constexpr int prompt = 60, budget = 20;
  OnText run(
      Role::scorer, "knorm", {{"every", std::int64_t{1}}}, budget, prompt + 8, 8,
      [](int layers, int heads) {
        std::vector<float> values(static_cast<std::size_t>(layers * heads), 1);
        values[0] = 3, values[1] = 0;
        return weights(layers, heads, values);
      },
      OnText::Split{"head_profile", {}});
  run.prefill(prompt);
  const int layers = run.config().layers, heads = run.config().kv_heads;
  std::vector<std::size_t> counts;
  for (int i = 0; i < layers * heads; ++i) counts.push_back(run.kept(i / heads, i % heads).size());
  CHECK(counts[0] > counts[2]);
  CHECK(counts[1] == 4);
  for (int step = 0; step < 5; ++step) {
    run.step();
    for (int i = 0; i < layers * heads; ++i)
      CHECK(run.kept(i / heads, i % heads).size() == counts[static_cast<std::size_t>(i)]);
  }
}

TEST_CASE("head_profile: what it cannot use is refused") {
  const auto refusal = [](const Profile& profile, const Settings& params = {}) {
    return message_of([&] {
      const auto budget = budget_of(params);
      budget->load_profile(profile);
      Shape shape;
      shape.layers = 2, shape.kv_heads = 2;
      budget->attach(shape);
    });
  };
  CHECK(refusal(weights(2, 2, {0, 1, 2, 3})) == "no error");
  CHECK_THAT(refusal(weights(2, 2, {0, 1, 2, 3}, "echo")),
             Catch::Contains("got a profile without the array 'gate', wanted weights: one of echo"));
  CHECK_THAT(refusal({}, {{"weights", std::string("x")}}), Catch::Contains("array 'x', wanted weights: one of none"));
  CHECK_THAT(refusal(weights(2, 3, {0, 1, 2, 3, 4, 5})),
             Catch::Contains("'gate' of 2 x 3 numbers, wanted one of each of 2 layers' 2 KV heads"));
  CHECK_THAT(refusal(weights(2, 2, {0, 1, NAN, 3})), Catch::Contains("got the weight nan of layer 1, KV head 0"));
  CHECK_THAT(refusal(weights(2, 2, {0, 1, 2, -3})), Catch::Contains("got the weight -3.000000 of layer 1, KV head 1"));
}
