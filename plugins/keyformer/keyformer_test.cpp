#include <limits>

#include "plugin/before_step.hpp"
#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

using Settings = std::map<std::string, ParamValue>;

Instance<Scorer> keyformer(const Settings& settings) {
  static Registry registry;
  const PluginInfo& info = registry.require(Role::scorer, "keyformer");
  return create<Scorer>(info, resolve(info, settings));
}

// The scores of four old tokens and a new one, after a step whose logits are 0, 0, ln 2, 0, 0.
std::vector<double> after_a_step(const Settings& settings, std::int32_t step) {
  PagedOptions o{1, 1, 8, 4, 4};
  o.state_columns = 1;
  PagedFixture cache(o);
  for (int t = 0; t < 5; ++t) {
    std::vector<float> k(8);
    k[0] = t == 2 ? std::log(2.f) : 0;
    cache.append(0, 0, k, k);
  }
  PagedKv pages = cache.view();
  std::vector<float> old = {1.2f, .5f, .9f, .1f, 0}, query(8);
  query[0] = std::sqrt(8.f);
  ops::blend_state({&pages, 0}, 0, View<const float, 3>::dense(old.data(), {1, 1, 5}), 1, Stream::cpu());

  Shape shape;
  shape.layers = shape.max_slots = shape.query_heads = shape.kv_heads = 1;
  shape.head_dim = 8, shape.page_size = 4, shape.max_tokens = 16;
  HeapWorkspace workspace;
  const auto scorer = keyformer(settings);
  scorer->attach(shape, {}, workspace);
  const std::vector<std::string> names = scorer->needs().token_state();
  const std::int32_t position = 5, budget = std::numeric_limits<std::int32_t>::max();
  const std::uint32_t sequence = 0;
  LayerKv now;
  now.shape = &shape, now.pages = pages, now.workspace = &workspace, now.state_names = &names;
  now.keys = {&pages, KvSide::key}, now.values = {&pages, KvSide::value};
  now.position = &position, now.step = &step, now.budget = &budget, now.sequence = &sequence;
  now.max_length = 5;
  now.queries = View<const float, 3>::dense(query.data(), {1, 1, 8});
  const std::int32_t slot = 0;
  now.slots = &slot;
  tell_before_step(
      scorer.get(),
      {.rows = 1, .slots = &slot, .position = &position, .step = &step, .budget = &budget, .sequence = &sequence});
  scorer->observe(now, Stream::cpu());
  Guarded<3> out({1, 1, 5});
  scorer->score(now, out.view(), Stream::cpu());
  const auto values = out.values();
  return {values.begin(), values.end()};
}

// The noise of a query of member g of a KV head's group and a key, both by text position, in sequence 0.
double gumbel(std::uint64_t seed, int layer, int kv_head, int g, int query, int key) {
  const auto mix = [](std::uint64_t z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  };
  const auto number = [&](std::uint64_t start, int i) {  // of the SplitMix64 sequence from `start` on
    return mix(start + 0x9e3779b97f4a7c15 * static_cast<std::uint64_t>(i + 1));
  };
  const auto first = [&](std::uint64_t a, std::uint64_t b) { return number(mix(a) ^ mix(~b), 0); };
  const std::uint64_t heads = first(first(seed, 1) + static_cast<std::uint64_t>(g),
                                    static_cast<std::uint64_t>(query) << 32 | static_cast<std::uint32_t>(layer));
  const double uniform = static_cast<double>(number(number(heads, kv_head), key) >> 40) / 16777216.0;
  return -std::log(-std::log(static_cast<double>(static_cast<float>(uniform) + 0x1p-26f)));
}

// The tokens that stay of these scores, in a budget.
std::vector<int> kept(const Settings& settings, std::vector<double> scores, int budget) {
  const Pins pins = keyformer(settings)->pins(budget);
  for (std::size_t t = scores.size() - static_cast<std::size_t>(pins.last); t < scores.size(); ++t)
    scores[t] = INFINITY;
  return best(scores, positions_to(static_cast<int>(scores.size())), static_cast<std::size_t>(budget));
}

}  // namespace

// The card: 60 % of a prompt of 100 are 60 tokens, of which 18 are the newest and 42 key tokens.
TEST_CASE("keyformer: newest and key tokens by hand") {
  CHECK(keyformer({})->pins(60).first == 0);
  CHECK(keyformer({})->pins(60).last == 18);
  constexpr int prompt = 100, budget = 60;
  std::vector<double> falling;
  for (int t = 0; t < prompt; ++t) falling.push_back(-t);
  std::vector<int> wanted;
  for (int t = 0; t < prompt; ++t)
    if (t < 42 || t >= 82) wanted.push_back(t);
  CHECK(kept({}, falling, budget) == wanted);
}

TEST_CASE("keyformer: a step without noise by hand, at the temperatures 1 and 2") {
  const auto near = [](double x) { return Approx(x).margin(1e-4); };
  // Of five tokens a budget of 4 keeps {0, 2, 3, 4}, whose newest two stay: the card has k_total 4 and w 2.
  const Settings cold = {{"noise", false}, {"tau_end", 1.}, {"recent", std::int64_t{50}}};
  const auto one = after_a_step(cold, 0);
  CHECK(kept(cold, one, 4) == std::vector<int>{0, 2, 3, 4});
  CHECK(one[0] == near(1.3667));
  CHECK(one[1] == near(.6667));
  CHECK(one[2] == near(1.2333));
  CHECK(one[3] == near(.2667));
  CHECK(one[4] == near(.1667));
  // The temperature is 2 in the last of 8 steps, and from then on.
  for (const std::int32_t step : {7, 8, 100}) {
    const Settings warm = {{"noise", false}, {"steps", std::int64_t{8}}, {"recent", std::int64_t{50}}};
    const auto two = after_a_step(warm, step);
    CHECK(kept(warm, two, 4) == std::vector<int>{0, 2, 3, 4});
    CHECK(two[0] == near(1.3847));
    CHECK(two[2] == near(1.1612));
    CHECK(two[4] == near(.1847));
  }
  // It grows from 1 by an eighth a step.
  const auto fourth = after_a_step({{"noise", false}, {"steps", std::int64_t{8}}}, 3);
  CHECK(fourth[4] == near(1 / (4 + std::pow(2, 1 / 1.5))));
}

TEST_CASE("keyformer: noise moves the scores, adds up to 1 and is the same every time") {
  const auto noisy = after_a_step({}, 0);
  CHECK(noisy == after_a_step({}, 0));
  CHECK(noisy != after_a_step({{"seed", std::int64_t{2}}}, 0));
  CHECK(noisy != after_a_step({{"noise", false}}, 0));
  CHECK(noisy[0] + noisy[1] + noisy[2] + noisy[3] + noisy[4] == Approx(2.7 + 1));
}

// Logits 0, 0, ln 2, 0, 0 of query 4, with the noise of the key's token alone.
TEST_CASE("keyformer: one vector of noise serves all queries") {
  const Settings one{{"fresh_noise", false}, {"tau_end", 1.}};
  const double old[] = {1.2, .5, .9, .1, 0};
  std::vector<double> logits;
  for (int t = 0; t < 5; ++t) logits.push_back((t == 2 ? std::log(2.) : 0) + gumbel(1, 0, 0, 0, 0, t));
  const auto shares = softmax(logits), got = after_a_step(one, 0);
  for (std::size_t t = 0; t < 5; ++t) CHECK(got[t] == Approx(old[t] + shares[t]).margin(1e-5));
  CHECK(got == after_a_step(one, 7));
  CHECK(got != after_a_step({{"tau_end", 1.}}, 0));
}

TEST_CASE("keyformer keeps on real text what a plain implementation keeps") {
  constexpr int prompt = 100, budget = 40, steps = 24, recent = 12;
  const double tau_end = 1.8;
  const auto [noise, fresh] = GENERATE(table<bool, bool>({{false, true}, {true, true}, {true, false}}));
  CAPTURE(noise, fresh);
  OnText run(Role::scorer, "keyformer",
             {{"noise", noise},
              {"fresh_noise", fresh},
              {"tau_end", tau_end},
              {"steps", std::int64_t{20}},
              {"seed", std::int64_t{5}}},
             budget, prompt + steps, 16);
  run.prefill(prompt);
  const auto layers = static_cast<std::size_t>(run.config().layers),
             heads = static_cast<std::size_t>(run.config().kv_heads);
  std::vector<std::vector<int>> kept(layers * heads);
  std::vector<std::map<int, double>> scores(layers * heads);
  // Adds the softmax of the query at a position over the head's tokens, mean over the group.
  const auto add = [&](std::size_t i, int position, double tau) {
    const auto& seen = run.layer(static_cast<int>(i / heads));
    for (std::size_t g = 0; g < static_cast<std::size_t>(run.group()); ++g) {
      const auto& q =
          seen.queries.at[static_cast<std::size_t>(position)][i % heads * static_cast<std::size_t>(run.group()) + g];
      std::vector<double> s;
      for (const int t : kept[i])
        s.push_back(
            (dot(q, seen.keys.at[static_cast<std::size_t>(t)][i % heads]) / std::sqrt(static_cast<double>(q.size())) +
             (noise ? gumbel(5, static_cast<int>(i / heads), static_cast<int>(i % heads), static_cast<int>(g),
                             fresh ? position : 0, t)
                    : 0)) /
            tau);
      s = softmax(s);
      for (std::size_t t = 0; t < s.size(); ++t) scores[i][kept[i][t]] += s[t] / run.group();
    }
  };
  const auto shrink = [&](std::size_t i) {
    std::vector<double> all;
    for (const int t : kept[i]) all.push_back(scores[i][t]);
    for (std::size_t t = all.size() - recent; t < all.size(); ++t) all[t] = 1e30;
    kept[i] = best(all, kept[i], budget);
  };
  for (std::size_t i = 0; i < kept.size(); ++i) {
    for (int t = 0; t < prompt; ++t) {
      kept[i].push_back(t);
      add(i, t, 1);
    }
    shrink(i);
  }
  for (int now = prompt; now <= prompt + steps; ++now) {
    for (std::size_t i = 0; i < kept.size(); ++i) {
      CAPTURE(now, i);
      if (now > prompt) {
        kept[i].push_back(now - 1);
        add(i, now - 1, 1 + (tau_end - 1) * std::min(now - prompt, 20) / 20);
        shrink(i);
      }
      REQUIRE(run.kept(static_cast<int>(i / heads), static_cast<int>(i % heads)) == kept[i]);
    }
    if (now < prompt + steps) run.step();
  }
}

TEST_CASE("keyformer refuses a temperature that falls") {
  CHECK_THROWS_WITH(OnText(Role::scorer, "keyformer", {{"tau_end", .5}}, 40, 100, 16),
                    Catch::Contains("got tau_end 0.5") && Catch::Contains("wanted at least tau_init 1.0"));
}
