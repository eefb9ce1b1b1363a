#include <kvlab/statistics.hpp>

#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr int prompt = 200, steps = 40, sinks = 5, window = 30;

// Gates that no rule of the plugin made up: layer and head give a number from 0 to 1.
float gate(int layer, int head) { return static_cast<float>((layer * 7 + head * 5) % 11) / 10; }

Profile gates(int layers, int kv_heads) {
  ProfileArray array{{layers, kv_heads}, {}, ""};
  for (int l = 0; l < layers; ++l)
    for (int h = 0; h < kv_heads; ++h) array.values.push_back(gate(l, h));
  return {{"gate", array}};
}

std::map<std::string, ParamValue> params(std::map<std::string, ParamValue> more = {}) {
  more["sinks"] = std::int64_t{sinks}, more["window"] = std::int64_t{window};
  return more;
}

std::vector<int> streamed(int seen, int first) {
  std::vector<int> kept;
  for (int p = 0; p < seen; ++p)
    if (p < first || p >= seen - window) kept.push_back(p);
  return kept;
}

OnText on_text(const std::map<std::string, ParamValue>& given, const OnText::MakeProfile& make) {
  return OnText(Role::policy, "duo_attention", given, 0, prompt + steps, 8, make);
}

}  // namespace

TEST_CASE("duo_attention: the quantile of gates, by hand") {
  using Marks = std::vector<bool>;
  // The median of .9, .1, .5 and .5 with noise lies between both halves.
  CHECK(retrieval_heads({.9f, .1f, .5f, .5f + 1e-7f}, .5) == Marks{true, false, false, true});
  CHECK(retrieval_heads({.9f, .1f, .5f, .5f}, .5) == Marks{true, false, true, false});
  // numpy.quantile([.1, .2, .4, .8, .9], .25) is .2, and .3 interpolates to .24.
  CHECK(retrieval_heads({.4f, .1f, .9f, .2f, .8f}, .25) == Marks{true, false, true, true, true});
  CHECK(retrieval_heads({.4f, .1f, .9f, .2f, .8f}, .3) == Marks{true, false, true, false, true});
  CHECK(retrieval_heads({.4f, .1f, .9f, .2f, .8f}, 0) == Marks(5, true));
  CHECK(retrieval_heads({.4f, .1f, .9f, .2f, .8f}, 1) == Marks(5, false));
  CHECK(retrieval_heads({1.5f, 1, .2f}, .9) == Marks{true, false, false});  // a gate above 1 is 1
  CHECK_THROWS_WITH(retrieval_heads({.5f, NAN}, .5), Catch::Contains("got the gate nan of KV head 1"));
}

TEST_CASE("duo_attention keeps on real text what a plain implementation keeps") {
  const double sparsity = GENERATE(.5, .75);
  const std::string off = GENERATE("nothing", "attention_sinks", "retrieval_heads");
  CAPTURE(sparsity, off);
  auto given = params({{"sparsity", sparsity}});
  if (off != "nothing") given[off] = false;
  OnText run = on_text(given, off == "retrieval_heads" ? OnText::MakeProfile() : gates);
  run.prefill(prompt);
  const int layers = run.config().layers, heads = run.config().kv_heads;
  // A head is a retrieval head if fewer than that many heads come before it.
  const int retrieval = layers * heads - static_cast<int>(std::ceil(sparsity * (layers * heads - 1)));
  const auto keeps_all = [&](int layer, int head) {
    int before = 0;
    for (int l = 0; l < layers; ++l)
      for (int h = 0; h < heads; ++h)
        before +=
            gate(l, h) > gate(layer, head) || (gate(l, h) == gate(layer, head) && l * heads + h < layer * heads + head);
    return off != "retrieval_heads" && before < retrieval;
  };
  int all = 0;
  for (int seen = prompt; seen <= prompt + steps; ++seen) {
    for (int layer = 0; layer < layers; ++layer)
      for (int head = 0; head < heads; ++head) {
        CAPTURE(seen, layer, head);
        const bool keeps = keeps_all(layer, head);
        all += keeps;
        REQUIRE(run.kept(layer, head) ==
                (keeps ? positions_to(seen) : streamed(seen, off == "attention_sinks" ? 0 : sinks)));
      }
    if (seen < prompt + steps) run.step();
  }
  CHECK(all == (off == "retrieval_heads" ? 0 : retrieval * (steps + 1)));
}

// The card: of 1000 tokens, eight heads with 64 sinks and a window of 256, half of them streaming, keep 5280 of 8000.
TEST_CASE("duo_attention: the card's memory by hand") {
  Shape shape;
  shape.layers = 1, shape.max_slots = 1, shape.query_heads = shape.kv_heads = 8;
  shape.head_dim = 8, shape.page_size = 1, shape.max_tokens = 1000;
  HeapWorkspace workspace;
  static Registry registry;
  const PluginInfo& info = registry.require(Role::policy, "duo_attention");
  const auto policy = create<Policy>(info, resolve(info, {}));
  policy->load_profile({{"gate", {{1, 8}, {.9f, .1f, .5f, .2f, .8f, .3f, .7f, .6f}, ""}}});
  policy->attach(shape, {}, workspace);
  CHECK(8 * policy->demand(1000, 0).device_prefill == 5280);  // of a KV head, the mean

  // The cache itself at half of these sizes: our text has 906 tokens.
  OnText run(Role::policy, "duo_attention", {{"sinks", std::int64_t{32}}, {"window", std::int64_t{128}}}, 0, 500, 16,
             gates);
  run.prefill(500);
  const int heads = run.config().kv_heads, all = run.config().layers * heads;
  std::size_t kept = 0;
  for (int i = 0; i < all; ++i) kept += run.kept(i / heads, i % heads).size();
  CHECK(kept * 8 == static_cast<std::size_t>(all) * 2640);
}

TEST_CASE("duo_attention: a prompt of sinks and window stays whole, and a longer text is cut while decoding") {
  OnText run = on_text(params({{"retrieval_heads", false}}), {});
  run.prefill(sinks + window);
  CHECK(run.kept(0, 0) == positions_to(sinks + window));
  run.step();
  CHECK(run.kept(0, 0) == streamed(sinks + window + 1, sinks));
}

TEST_CASE("duo_attention: what it cannot use is refused") {
  const auto profile = [](std::vector<float> values, std::int64_t heads) {
    return [values = std::move(values), heads](int layers, int kv_heads) {
      Profile p = gates(layers, kv_heads);
      if (!values.empty()) p["gate"] = {{layers, heads}, values, ""};
      return p;
    };
  };
  CHECK_THROWS_WITH(on_text(params(), profile({1, 0, 1}, 3)), Catch::Contains("got 3 gates, wanted"));
  CHECK_THROWS_WITH(on_text(params(),
                            [](int layers, int heads) {
                              Profile p = gates(layers, heads);
                              p["gate"].values[1] = NAN;
                              return p;
                            }),
                    Catch::Contains("got the gate nan"));
  CHECK_THROWS_WITH(on_text(params(),
                            [](int, int) {
                              return Profile{{"unstable", {{1}, {1}, ""}}};
                            }),
                    Catch::Contains("got a profile without an array that the plugin reads"));
  CHECK_THROWS_WITH(OnText(Role::policy, "duo_attention", params({{"retrieval_heads", false}}), 64, 100, 8),
                    Catch::Contains("budget"));
}
