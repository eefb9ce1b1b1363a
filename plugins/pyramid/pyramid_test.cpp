#include <catch2/catch.hpp>
#include <numeric>
#include <vector>

#include "cases/paged_fixture.hpp"
#include "plugin/loader.hpp"
#include "plugin/parameters.hpp"
#include "plugin/registry.hpp"
#include "plugin/verified.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

// Tokens of each layer, for one sequence of n tokens and one KV head. Throws where kvlab refuses the sum.
std::vector<int> allotted(int layers, int n, int cap, Pins pins, bool exact_total, int beta = 20,
                          bool window_inside = false) {
  static Registry registry;
  const PluginInfo& info = registry.require(Role::budget, "pyramid");
  const auto budget = create<Budget>(
      info,
      resolve(info, {{"beta", std::int64_t{beta}}, {"exact_total", exact_total}, {"window_inside", window_inside}}));
  HeapWorkspace workspace;
  LayerKv kv;
  kv.pages.rows = kv.pages.kv_heads = 1;
  kv.workspace = &workspace;
  const std::int32_t seen = n, total = cap;
  kv.position = &seen;
  std::int32_t keep = 0;
  Allotment a;
  a.layers = layers;
  a.length = View<const std::int32_t, 2>::dense(&seen, {1, 1});
  a.keep = View<std::int32_t, 2>::dense(&keep, {1, 1});
  a.pins = a.host_pins = &pins;
  a.total = a.host_total = &total;
  a.kv = &kv;
  std::vector<int> out;
  for (a.layer = 0; a.layer < layers; ++a.layer) {
    kv.layer = a.layer;
    budget->allot(a, Stream::cpu());
    out.push_back(keep);
  }
  verified(budget.get())->verify();
  return out;
}

int sum(const std::vector<int>& tokens) { return std::accumulate(tokens.begin(), tokens.end(), 0); }

}  // namespace

TEST_CASE("pyramid: shares that hold the window, by hand") {
  const auto shares = [](int n, int cap, int pinned, int beta) {
    return allotted(8, n, cap, {.first = 0, .last = pinned}, true, beta, true);
  };
  // From 2 * 40 - 10 to 40 / 4: 70, 61.43, 52.86, 44.29, 35.71, 27.14, 18.57 and 10.
  CHECK(shares(120, 40, 8, 4) == std::vector<int>{70, 61, 53, 44, 36, 27, 19, 10});
  // The first layer has room for 60 - 8 tokens, so the last one keeps 80 - 52: a step is 24 / 7.
  CHECK(shares(60, 40, 8, 4) == std::vector<int>{52, 49, 45, 42, 38, 35, 31, 28});
  CHECK(shares(120, 40, 8, 20) == std::vector<int>(8, 40));  // a last layer of 2 tokens cannot hold the window
  CHECK(shares(30, 40, 8, 4) == std::vector<int>(8, 30));
  CHECK(allotted(1, 120, 40, {}, true, 4, true) == std::vector<int>{40});
}

TEST_CASE("pyramid: the layers' tokens add up to the budget") {
  // The first layer keeps 2 * 64 - 3 tokens and the last 64 / 20. The step between layers is 122 / 7.
  CHECK(allotted(8, 1000, 64, {}, true) == std::vector<int>{125, 108, 91, 73, 55, 37, 20, 3});
  CHECK(allotted(3, 1000, 24, {.first = 0, .last = 8}, true) == std::vector<int>{40, 24, 8});
  for (const int layers : {1, 2, 7, 30, 32, 80})
    for (const int cap : {1, 9, 64, 128, 500})
      for (const int pinned : {0, 1, 8}) {
        if (pinned > cap) continue;
        for (const int n : {cap, 2 * cap - pinned, 2 * cap, 5000}) {
          CAPTURE(layers, cap, pinned, n);
          CHECK(sum(allotted(layers, n, cap, {.first = 0, .last = pinned}, true)) == layers * cap);
        }
      }
}

TEST_CASE("pyramid: the counts of kvpress, whose window is part of the budget") {
  const auto tokens = allotted(32, 4096, 2048, {}, true);
  CHECK(tokens.front() == 3994);
  CHECK(tokens.back() == 102);
  CHECK(sum(tokens) == 65536);
}

TEST_CASE("pyramid: the counts of the authors' code") {
  const Pins window{.first = 0, .last = 8};
  const auto tokens = allotted(32, 1000, 128, window, false);
  CHECK(tokens.front() == 242);
  CHECK(tokens.back() == 25);
  CHECK(sum(tokens) == 4272);
  for (const bool exact_total : {true, false}) {
    CHECK(allotted(32, 200, 128, window, exact_total) == std::vector<int>(32, 128));
    CHECK(allotted(32, 100, 128, window, exact_total) == std::vector<int>(32, 100));
  }
  // The step of 122 / 7 loses 3 / 7 of a token, and no window makes room for the rest.
  CHECK_THROWS_WITH(allotted(8, 1000, 64, {}, false),
                    Catch::Contains("got 524 tokens to keep over all layers and KV heads, wanted about 512"));
}
