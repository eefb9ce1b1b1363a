// Hand vectors of HeteroCache's division, drift test and recall, and runs on real text beside a plain implementation.
#include <kvlab/error.hpp>

#include <map>

#include "division.hpp"
#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

using Ints = std::vector<std::int32_t>;
using ParamMap = std::map<std::string, ParamValue>;

std::vector<double> weights(std::size_t full, const std::vector<double>& stable) {
  std::vector<double> out(full, 0);
  for (const double s : stable) out.push_back(1 / s);
  return out;
}

Ints all_but(std::size_t full, Ints tokens) {
  return {tokens.begin() + static_cast<std::ptrdiff_t>(full), tokens.end()};
}

// One sequence of two KV heads. Lists that last of its slot, and a flag for each head.
struct TwoHeads {
  explicit TwoHeads(int tokens) : memory(1, 2, 16, {tokens, tokens}), kv(memory.view()) {
    index.resize(static_cast<std::size_t>(2 * tokens));
    list.index = View<std::int32_t, 3>::dense(index.data(), {1, 2, tokens});
    list.count = View<std::int32_t, 2>::dense(count.data(), {1, 2});
    list.slots = kv.slots;
  }
  void set(int head, const Ints& tokens) {
    count[static_cast<std::size_t>(head)] = static_cast<std::int32_t>(tokens.size());
    std::copy(tokens.begin(), tokens.end(), &list.index(0, head, 0));
  }
  Ints get(int head) const {
    const auto* first = &list.index(0, head, 0);
    return {first, first + count[static_cast<std::size_t>(head)]};
  }
  LengthsOnly memory;
  PagedKv kv;
  Ints index, count = Ints(2);
  TokenList list;
  std::vector<std::uint8_t> flags = std::vector<std::uint8_t>(2, 7);
};

}  // namespace

TEST_CASE("shares of the least stable heads are the largest, as by hand") {
  const std::vector<double> w = weights(2, {.9, .8, .6, .5, .5, .4});
  const int base = heterocache::base_of(8, 2, 1000, 500);
  CHECK(base == 333);
  for (const bool fill : {false, true}) {
    const Ints tokens = heterocache::divided(w, base, 1000, fill);
    CHECK(tokens[0] == 1000);
    CHECK(all_but(2, tokens) == Ints{210, 237, 316, 379, 379, 474});
  }
  CHECK(heterocache::divided(weights(1, {1, 1, 1}), 77, 100, true) == Ints{100, 77, 77, 77});
}

// Weights 20, 1, 1 and 180 tokens: the first head would take 163 of a prompt of 100.
TEST_CASE("what a head cannot keep goes to the others, or is lost") {
  CHECK(heterocache::divided(weights(0, {.05, 1, 1}), 60, 100, true) == Ints{100, 40, 40});
  CHECK(heterocache::divided(weights(0, {.05, 1, 1}), 60, 100, false) == Ints{100, 8, 8});
}

TEST_CASE("the base is what the heads that keep all leave over") {
  CHECK(heterocache::base_of(8, 2, 1000, 250) == 0);  // exactly the two full heads
  CHECK(heterocache::base_of(8, 2, 1000, 251) == 1);
  CHECK(heterocache::base_of(8, 2, 1000, 1000) == 1000);
  CHECK(heterocache::base_of(8, 2, 1000, 1 << 30) == 1000);
  CHECK(heterocache::base_of(8, 8, 1000, 10) == 1000);
  CHECK(heterocache::base_of(8, 2, 1, 0) == 0);
}

// (rho * N - N_full) * n / N_comp of Llama is 378.3. From 499 of 499.5 tokens it would be 377.6.
TEST_CASE("the base of a ratio is rounded once") {
  CHECK(heterocache::base_of(256, 50, 999, .5 * 999) == 378);
  CHECK(heterocache::base_of(256, 50, 999, 499) == 377);
  CHECK(heterocache::base_of(10, 0, 100, .29 * 100) == 29);  // .29 * 100 is less than 29
  CHECK(heterocache::base_of(10, 3, 30, .3 * 30) == 0);
}

namespace {

// A watch over TwoHeads: head 0 is the pivot of both. A check is due in every fifth step.
struct Watch {
  explicit Watch(float threshold) : two(12) {
    two.set(0, {1, 2, 3, 4}), two.set(1, {0, 5});
    rule.threshold = threshold, rule.window = rule.period = 5, rule.lead = 1, rule.steps = &steps;
  }
  // Whether both heads drift in the next step, whose best tokens these are.
  bool step(const Ints& best) {
    std::vector<float> scores(2 * 12);
    const auto of = View<float, 3>::dense(scores.data(), {1, 2, 12});
    for (const std::int32_t t : best) of(0, 0, t) = 1;
    const HeadFlags flags = View<std::uint8_t, 2>::dense(two.flags.data(), {1, 2});
    ops::drifted_heads(two.kv, of, two.list, rule, leaders.data(), watch, flags, Stream::cpu());
    ++steps;
    CHECK(two.flags[0] == two.flags[1]);
    return two.flags[0] != 0;
  }
  TwoHeads two;
  std::int32_t steps = 0;
  Ints leaders{0, 0};
  std::vector<float> missed = std::vector<float>(2 * 5);
  std::vector<std::uint8_t> rests = std::vector<std::uint8_t>(2);
  ops::DriftRule rule;
  ops::DriftWatch watch{View<float, 3>::dense(missed.data(), {1, 2, 5}),
                        View<std::uint8_t, 2>::dense(rests.data(), {1, 2})};
};

const std::vector<Ints> five{{1, 2, 3, 4}, {1, 2, 8, 9}, {4, 8, 9, 10}, {3, 0, 9, 11}, {2, 3, 4, 7}};

}  // namespace

// Overlaps 4, 2, 1, 1 and 3 of the base set {1, 2, 3, 4}: their median is .5.
TEST_CASE("a pivot drifts when the median overlap lies below the threshold, and not at it") {
  for (const float threshold : {.5f, .6f}) {
    Watch w(threshold);
    for (int i = 0; i < 4; ++i) CHECK_FALSE(w.step(five[static_cast<std::size_t>(i)]));
    CHECK(w.rests[0] == 0);
    CHECK(w.step(five[4]) == (threshold > .5f));  // and its satellite with it
    CHECK(std::ranges::count(w.missed, 0) == 10);
  }
}

TEST_CASE("a pivot rests once three of five overlaps decide the check") {
  Watch w(.4f);
  CHECK_FALSE(w.step(five[0]));
  CHECK_FALSE(w.step(five[2]));
  CHECK_FALSE(w.step(five[1]));
  CHECK(w.rests[0] == 0);
  CHECK_FALSE(w.step(five[4]));  // the third of 0.5 or more
  CHECK(w.rests[0] == 1);
  CHECK_FALSE(w.step({8, 9, 10, 11}));  // nobody reads these scores
  CHECK(w.rests[0] == 0);
  CHECK(std::ranges::count(w.missed, 0) == 10);
}

TEST_CASE("a pivot that has drifted rests until the check, which needs the last scores") {
  Watch w(.6f);
  for (const int i : {2, 3, 2}) CHECK_FALSE(w.step(five[static_cast<std::size_t>(i)]));
  CHECK(w.rests[0] == 1);
  CHECK_FALSE(w.step(five[0]));
  CHECK(w.rests[0] == 0);
  CHECK(w.step(five[0]));
}

TEST_CASE("forgotten overlaps count as 1") {
  Watch w(.6f);
  for (const int i : {2, 3, 2, 2}) CHECK_FALSE(w.step(five[static_cast<std::size_t>(i)]));
  ops::forget_overlaps(w.two.kv, w.watch, Stream::cpu());
  CHECK(w.rests[0] == 0);
  CHECK_FALSE(w.step(five[2]));
}

// The pivot ranks 90 > 10 > 50 > 20. A cluster's largest satellite takes 4 tokens, and this one takes 2.
TEST_CASE("a satellite fetches its own best tokens, or as the released code the first by position") {
  TwoHeads two(100);
  two.set(0, {0, 1, 2, 3}), two.set(1, {0, 1});
  std::vector<float> scores(2 * 100);
  scores[90] = 4, scores[10] = 3, scores[50] = 2, scores[20] = 1;
  const auto of = View<const float, 3>::dense(scores.data(), {1, 2, 100});
  const Ints by{0, 0}, among{0, 0};
  ops::top_tokens(two.kv, of, {.by = by.data()}, two.list, Stream::cpu());
  CHECK(two.get(0) == Ints{10, 20, 50, 90});
  CHECK(two.get(1) == Ints{10, 90});
  ops::top_tokens(two.kv, of, {.by = by.data(), .among = among.data()}, two.list, Stream::cpu());
  CHECK(two.get(0) == Ints{10, 20, 50, 90});
  CHECK(two.get(1) == Ints{10, 20});
}

namespace {

constexpr int page = 8, prompt = 200, steps = 17;

constexpr float of_heads[] = {2, 3, 3, 0};
float stable_of(int layer, int head) { return .3f + .1f * static_cast<float>((layer + 2 * head) % 5); }

// Head 0 of each layer is a pivot, heads 1 and 2 its satellites, the others anchors; of the last layer all are anchors.
Profile roles(int layers, int heads) {
  Profile p;
  for (const char* name : {"role", "pivot_of", "stable"}) p[name].extent = {layers, heads};
  for (int layer = 0; layer < layers; ++layer)
    for (int head = 0; head < heads; ++head) {
      const float role = layer + 1 == layers || head > 3 ? 0 : of_heads[head];
      p["role"].values.push_back(role);
      p["pivot_of"].values.push_back(role == 3 ? 0.f : -1.f);
      p["stable"].values.push_back(stable_of(layer, head));
    }
  return p;
}

// Pooled attention of the query at `position` over the first n tokens, the greatest of the group.
std::vector<double> scores_of(const OnText& run, int layer, int head, int position, int n) {
  const auto& seen = run.layer(layer);
  std::vector<double> best(static_cast<std::size_t>(n), 0);
  for (int g = head * run.group(); g < (head + 1) * run.group(); ++g) {
    const auto& q = seen.queries.at[static_cast<std::size_t>(position)][static_cast<std::size_t>(g)];
    std::vector<double> logits;
    for (int t = 0; t < n; ++t)
      logits.push_back(dot(q, seen.keys.at[static_cast<std::size_t>(t)][static_cast<std::size_t>(head)]) /
                       std::sqrt(static_cast<double>(q.size())));
    const auto row = softmax(logits);
    for (int t = 0; t < n; ++t) {
      double sum = 0;
      for (int i = std::max(0, t - 2); i <= std::min(n - 1, t + 2); ++i) sum += row[static_cast<std::size_t>(i)];
      best[static_cast<std::size_t>(t)] = std::max(best[static_cast<std::size_t>(t)], sum / 5);
    }
  }
  return best;
}

std::vector<int> best_of(const OnText& run, int layer, int head, int position, int count) {
  return best(scores_of(run, layer, head, position, prompt), positions_to(prompt), static_cast<std::size_t>(count));
}

double overlap_of(const std::vector<int>& a, const std::vector<int>& b) {
  std::vector<int> both;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
  return static_cast<double>(both.size()) / static_cast<double>(b.size());
}

}  // namespace

TEST_CASE("heterocache holds on real text what a plain implementation holds") {
  struct Setting {
    double threshold;
    int window, every;
    const char* order;
    bool retrieval, asynchrony, stagger;
    int recall_steps = 1;
    int again = 0;      // tokens of a second prompt after seven steps
    bool zero = false;  // a satellite and an anchor have no stable token
  };
  const auto x = GENERATE(
      Setting{.5, 5, 5, "score", true, true, true}, Setting{.97, 5, 5, "score", true, false, false},
      Setting{.97, 5, 5, "position", true, true, true}, Setting{.97, 5, 5, "score", true, true, true},
      Setting{.95, 4, 1, "score", true, true, true}, Setting{1, 3, 2, "score", false, true, true},
      Setting{0, 2, 2, "score", true, true, false}, Setting{.97, 5, 5, "score", true, true, true, 4},
      Setting{.97, 3, 2, "score", true, false, false, 7}, Setting{.97, 5, 5, "score", true, true, true, 1, 9},
      Setting{.97, 3, 2, "score", true, false, true, 4, 90}, Setting{.97, 5, 5, "score", true, true, true, 1, 0, true},
      Setting{.97, 5, 5, "position", true, false, false, 1, 0, true});
  CAPTURE(x.threshold, x.window, x.every, x.order, x.retrieval, x.recall_steps, x.again);
  const ParamMap params{{"threshold", x.threshold},
                        {"window", std::int64_t{x.window}},
                        {"check_every", std::int64_t{x.every}},
                        {"recall_order", std::string(x.order)},
                        {"retrieval", x.retrieval},
                        {"asynchrony", x.asynchrony},
                        {"stagger", x.stagger},
                        {"recall_steps", std::int64_t{x.recall_steps}}};
  constexpr int budget = 120;
  const auto profile = [&](int layers, int heads) {
    Profile p = roles(layers, heads);
    auto& stable = p["stable"].values;
    if (x.zero) stable[1] = stable.back() = 0;
    return p;
  };
  OnText run(Role::policy, "heterocache", params, budget, prompt + steps + x.again, page, profile);
  const int layers = run.config().layers, heads = run.config().kv_heads;
  REQUIRE(heads >= 3);
  const Profile p = profile(layers, heads);
  std::vector<double> w;
  std::size_t full = 0;
  for (std::size_t i = 0; i < p.at("role").values.size(); ++i) {
    w.push_back(p.at("role").values[i] == 2 ? 0 : 1 / std::max(.05, double{p.at("stable").values[i]}));
    full += p.at("role").values[i] == 2;
  }
  const int base = heterocache::base_of(w.size(), full, prompt, budget);
  const Ints tokens = heterocache::divided(w, base, prompt, true);
  if (x.zero) CHECK((tokens[1] == *std::max_element(tokens.begin() + 1, tokens.begin() + heads)));
  const auto at = [&](int layer, int head) { return static_cast<std::size_t>(layer * heads + head); };

  run.prefill(prompt);
  std::vector<std::vector<int>> held, bases(static_cast<std::size_t>(layers));
  for (int layer = 0; layer < layers; ++layer) {
    for (int head = 0; head < heads; ++head)
      held.push_back(best_of(run, layer, head, prompt - 1, tokens[at(layer, head)]));
    bases[static_cast<std::size_t>(layer)] = best_of(run, layer, 0, prompt - 1, base);
  }
  int drifts = 0, checks = 0, waited = 0;
  // What satellites fetch when they have their turn, and what comes beside the next step.
  std::map<std::size_t, std::vector<int>> waits, coming;
  // [layer] overlaps with the base sets of their steps; those before a drift, and before the first step, count as 1.
  std::vector<std::vector<double>> overlaps_of(bases.size());
  const auto check = [&](int position) {
    for (int layer = 0; layer < layers; ++layer)
      for (int head = 0; head < heads; ++head) {
        CAPTURE(position, layer, head);
        std::vector<int> wanted = held[at(layer, head)];
        for (int t = prompt; t <= position; ++t) wanted.push_back(t);
        std::vector<int> kept = run.kept(layer, head);
        std::sort(kept.begin(), kept.end());
        CHECK(kept == wanted);
      }
  };
  check(prompt - 1);
  for (int step = 0; step < steps; ++step) {
    if (step == 7 && x.again > 0) {  // its tokens stay, like generated ones
      run.prefill(x.again);
      check(prompt + step + x.again - 1);
    }
    run.step();
    const int position = prompt + step + (step < 7 ? 0 : x.again);
    for (auto& [head, list] : std::exchange(coming, {})) held[head] = list;
    for (int layer = 0; x.retrieval && layer + 1 < layers; ++layer) {
      auto& own = bases[static_cast<std::size_t>(layer)];
      auto& known = overlaps_of[static_cast<std::size_t>(layer)];
      known.push_back(overlap_of(best_of(run, layer, 0, position, base), own));
      if ((step + 1 + (x.stagger ? layer % x.every : 0)) % x.every) continue;
      std::vector<double> overlaps(static_cast<std::size_t>(x.window), 1.);
      const std::size_t last = std::min(known.size(), overlaps.size());
      std::copy_n(known.end() - static_cast<std::ptrdiff_t>(last), last, overlaps.begin());
      std::sort(overlaps.begin(), overlaps.end());
      const auto middle = static_cast<std::size_t>(x.window / 2);
      const double median = x.window % 2 ? overlaps[middle] : (overlaps[middle - 1] + overlaps[middle]) / 2;
      ++checks;
      if (median >= static_cast<float>(x.threshold)) continue;
      ++drifts;
      known.clear();
      own = best_of(run, layer, 0, position, base);
      const int most = std::max(tokens[at(layer, 1)], tokens[at(layer, 2)]);
      for (const int head : {1, 2}) {
        auto& of = waits[at(layer, head)];
        const int count = tokens[at(layer, head)];
        of = best_of(run, layer, 0, position, x.order == std::string("score") ? count : most);
        of.resize(static_cast<std::size_t>(count));
      }
    }
    for (auto it = waits.begin(); it != waits.end();) {
      const int layer = static_cast<int>(it->first) / heads, satellite = static_cast<int>(it->first) % heads - 1;
      const bool turn = (step + 1 + (x.stagger ? layer : 0) + satellite) % x.recall_steps == 0;
      waited += !turn;
      if (turn) (x.asynchrony ? coming[it->first] : held[it->first]) = it->second;
      it = turn ? waits.erase(it) : std::next(it);
    }
    check(position);
  }
  if (x.threshold > .5 && x.retrieval) CHECK((drifts > 0 && checks > 0));
  CHECK((waited > 0) == (x.recall_steps > 1));
  if (x.threshold == 0 || !x.retrieval) CHECK(drifts == 0);
}

TEST_CASE("heterocache refuses a budget that full heads alone take, and profiles without roles") {
  const auto made = [](BudgetAmount budget, const Profile& profile, const ParamMap& params = {}) {
    static Registry registry;
    const PluginInfo& info = registry.require(Role::policy, "heterocache");
    auto policy = create<Policy>(info, resolve(info, params));
    Shape shape;
    shape.layers = 2, shape.query_heads = shape.kv_heads = 4, shape.head_dim = 8, shape.page_size = 8;
    shape.max_slots = 1, shape.max_tokens = 64;
    policy->load_profile(profile);
    HeapWorkspace w;
    policy->attach(shape, budget, w);
    return policy;
  };
  const Profile p = roles(2, 4);  // one full head of eight
  CHECK_NOTHROW(made({BudgetAmount::ratio, .126}, p));
  CHECK_THROWS_WITH(made({BudgetAmount::ratio, .125}, p),
                    Catch::Contains("got a ratio of 0.125, wanted more than 0.125: pivots and volatile heads"));
  CHECK_NOTHROW(made({}, p, {{"rho", .126}}));
  CHECK_THROWS_WITH(made({}, p, {{"rho", .125}}), Catch::Contains("got a ratio of 0.125, wanted more than 0.125"));
  CHECK_THROWS_WITH(made({BudgetAmount::ratio, .5}, p, {{"rho", .5}}),
                    Catch::Contains("got both rho and a budget, wanted one"));
  CHECK_THROWS_WITH(made({BudgetAmount::ratio, .5}, p, {{"kernel", std::int64_t{4}}}),
                    Catch::Contains("got a kernel of 4, wanted an odd one"));
  const auto policy = made({BudgetAmount::tokens, 8}, p);
  const bool last = true;
  const std::int32_t tokens = 64, budget = 8;
  const std::int32_t slot = 0;
  LayerPrefill kv;
  kv.last = &last, kv.position = &tokens, kv.budget = &budget, kv.slots = &slot;
  kv.chunk_queries.extent[2] = tokens;
  Edits edits;
  CHECK_THROWS_WITH(policy->prefill(kv, edits, Stream::cpu()),
                    Catch::Contains("got a prompt of 64 tokens with a budget of 8, wanted more than 8: pivots"));
  CHECK_THROWS_WITH(policy->demand(64, 9),
                    Catch::Contains("got a prompt of 64 tokens with a budget of 8, wanted more than 8: pivots"));
  CHECK_NOTHROW(policy->demand(63, 9));
  Profile none = p;
  none["role"].values[3] = NAN;
  CHECK_THROWS_WITH(made({}, none), Catch::Contains("wanted one with decode steps"));
}

TEST_CASE("heterocache's rho is a budget's ratio") {
  const auto [rho, tokens_of_base] = GENERATE(std::pair{.5, 72}, std::pair{.504, 73});  // (32 * 100.8 - 7 * 200) / 25
  OnText run(Role::policy, "heterocache", {{"rho", rho}}, 0, prompt + 1, page, roles);
  const int layers = run.config().layers, heads = run.config().kv_heads;
  const Profile p = roles(layers, heads);
  std::vector<double> w;
  std::size_t full = 0;
  for (std::size_t i = 0; i < p.at("role").values.size(); ++i) {
    w.push_back(p.at("role").values[i] == 2 ? 0 : 1 / double{p.at("stable").values[i]});
    full += p.at("role").values[i] == 2;
  }
  CHECK(heterocache::base_of(w.size(), full, prompt, rho * prompt) == tokens_of_base);
  const Ints tokens = heterocache::divided(w, tokens_of_base, prompt, true);
  run.prefill(prompt);
  for (int layer = 0; layer < layers; ++layer)
    for (int head = 0; head < heads; ++head) {
      std::vector<int> kept = run.kept(layer, head);
      std::sort(kept.begin(), kept.end());
      CHECK(kept == best_of(run, layer, head, prompt - 1, tokens[static_cast<std::size_t>(layer * heads + head)]));
    }
}

// A threshold of 1 would fetch at each check. The least stable head counts as .05, so it keeps most but not all.
TEST_CASE("heterocache without clustering: every head keeps its best tokens, and the host holds nothing") {
  const bool allocation = GENERATE(true, false);
  CAPTURE(allocation);
  constexpr int budget = 20;
  const auto with_zero = [](int layers, int heads) {
    Profile p = roles(layers, heads);
    p["stable"].values[5] = 0;
    return p;
  };
  OnText run(Role::policy, "heterocache",
             {{"clustering", false}, {"allocation", allocation}, {"threshold", 1.}, {"check_every", std::int64_t{1}}},
             budget, prompt + 7, page, allocation ? with_zero : OnText::MakeProfile());
  const int layers = run.config().layers, heads = run.config().kv_heads;
  std::vector<double> w(static_cast<std::size_t>(layers * heads), 1);
  const Profile p = with_zero(layers, heads);
  for (std::size_t i = 0; allocation && i < w.size(); ++i) w[i] = 1 / std::max(.05, double{p.at("stable").values[i]});
  const Ints tokens = heterocache::divided(w, budget, prompt, true);
  CHECK((tokens[5] > 3 * budget) == allocation);
  CHECK(tokens[5] < prompt);
  run.prefill(prompt);
  std::vector<std::vector<int>> wanted;
  for (int i = 0; i < layers * heads; ++i)
    wanted.push_back(best_of(run, i / heads, i % heads, prompt - 1, tokens[static_cast<std::size_t>(i)]));
  for (int step = 0; step <= 7; ++step) {
    for (int i = 0; i < layers * heads; ++i) {
      CAPTURE(step, i);
      std::vector<int> kept = run.kept(i / heads, i % heads);
      std::sort(kept.begin(), kept.end());
      CHECK(kept == wanted[static_cast<std::size_t>(i)]);
      wanted[static_cast<std::size_t>(i)].push_back(prompt + step);
    }
    if (step < 7) run.step();
  }
  CHECK(run.ledger().moved_total(Tier::host) == 0);
  CHECK(run.ledger().moved_total(Tier::device) == 0);
}

TEST_CASE("heterocache keeps a prompt of one token, and all tokens of a large budget") {
  for (const auto& [tokens, budget] : {std::pair{1, 5}, {30, 30}}) {
    OnText run(Role::policy, "heterocache", {}, budget, 80, page, roles);
    run.prefill(tokens);
    for (int step = 0; step < 7; ++step) run.step();
    for (int layer = 0; layer < run.config().layers; ++layer)
      for (int head = 0; head < run.config().kv_heads; ++head)
        CHECK(static_cast<int>(run.kept(layer, head).size()) == tokens + 7);
  }
}
