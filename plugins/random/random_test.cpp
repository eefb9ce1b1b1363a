#include <kvlab/random.hpp>

#include <numeric>
#include <optional>

#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

// Caches of one row whose heads hold the same text positions, and the tokens that stay of them.
class Draws {
 public:
  Draws(int heads, int tokens) : cache_({1, heads, 8, 16, (tokens + 15) / 16}), tokens_(tokens) {
    const std::vector<float> zeros(8, 0.f);
    for (int h = 0; h < heads; ++h)
      for (int t = 0; t < tokens; ++t) cache_.append(0, h, zeros, zeros, t);
    scored_.emplace(cache_, heads);
    scored_->kv.sequence = &sequence, scored_->kv.budget = &budget, scored_->kv.step = &step;
  }
  // [head][token] draws.
  std::vector<std::vector<double>> by(const std::map<std::string, ParamValue>& params) {
    scored_->kv.layer = layer;
    scored_->kv.position = &position;
    const std::vector<double> all = scored_->by("random", params);
    std::vector<std::vector<double>> out;
    for (std::size_t at = 0; at < all.size(); at += static_cast<std::size_t>(tokens_))
      out.emplace_back(all.begin() + static_cast<std::ptrdiff_t>(at),
                       all.begin() + static_cast<std::ptrdiff_t>(at) + tokens_);
    return out;
  }
  // [head] flags of the `count` best tokens.
  std::vector<std::vector<int>> kept(const std::map<std::string, ParamValue>& params, std::size_t count) {
    std::vector<std::vector<int>> out;
    for (const std::vector<double>& scores : by(params)) {
      out.emplace_back(scores.size(), 0);
      for (const int p : best(scores, positions_to(tokens_), count)) out.back()[static_cast<std::size_t>(p)] = 1;
    }
    return out;
  }

  std::uint32_t sequence = 0;
  std::int32_t position = 1, budget = 0, step = 0;
  int layer = 0;

 private:
  PagedFixture cache_;
  std::optional<Scored> scored_;
  int tokens_;
};

// Of m among n items, drawn without replacement: how many two such sets share has this mean and variance.
struct Shared {
  double n, m;
  double mean() const { return m * m / n; }
  double variance() const { return m * m * (n - m) * (n - m) / (n * n * (n - 1)); }
};

int shared(const std::vector<int>& a, const std::vector<int>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0);
}

// SplitMix64 in Vigna's form.
std::uint64_t number(std::uint64_t state, int i) {
  std::uint64_t z = 0;
  for (int k = 0; k <= i; ++k) {
    z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    z ^= z >> 31;
  }
  return z;
}

// The draws of text positions below n, as random.cpp and ops.hpp define them.
std::vector<double> draws(std::uint64_t seed, std::uint32_t sequence, int layer, int head, int n) {
  const std::uint64_t key = Random(Random(seed, sequence).next(), static_cast<std::uint32_t>(layer)).next();
  std::vector<double> out;
  for (int p = 0; p < n; ++p) out.push_back(static_cast<double>(number(number(key, head), p) >> 40));
  return out;
}

}  // namespace

TEST_CASE("random: each token stays equally often") {
  constexpr int n = 32, m = 12, sequences = 4000;
  Draws cache(1, n);
  std::vector<double> stayed(n);
  for (std::uint32_t s = 0; s < sequences; ++s) {
    cache.sequence = s;
    const auto kept = cache.kept({}, m);
    for (std::size_t t = 0; t < n; ++t) stayed[t] += kept[0][t];
  }
  // The sum has a chi-square distribution of n - 1 degrees: counts vary by p (1 - p) and add up to m.
  const double p = static_cast<double>(m) / n, expected = sequences * p;
  double sum = 0;
  for (const double count : stayed) sum += (count - expected) * (count - expected) / (expected * (1 - p)) * (n - 1) / n;
  CAPTURE(sum);
  CHECK(sum < 84);  // one in a million, by Wilson and Hilferty's formula
  CHECK(sum > 5);   // so even a spread is as unlikely
}

TEST_CASE("random: heads, layers, sequences and seeds draw on their own") {
  constexpr int n = 32, m = 12, sequences = 2000;
  Draws cache(2, n);
  double heads = 0, layers = 0, neighbours = 0, seeds = 0;
  std::vector<int> before;
  for (std::uint32_t s = 0; s < sequences; ++s) {
    cache.sequence = s;
    cache.layer = 0;
    const auto kept = cache.kept({}, m), other = cache.kept({{"seed", std::int64_t{1}}}, m);
    cache.layer = 1;
    const auto above = cache.kept({}, m);
    heads += shared(kept[0], kept[1]);
    layers += shared(kept[0], above[0]);
    seeds += shared(kept[0], other[0]);
    neighbours += before.empty() ? Shared{n, m}.mean() : shared(kept[0], before);
    before = kept[0];
  }
  const Shared by_chance{n, m};
  for (const double sum : {heads, layers, neighbours, seeds}) {
    const double z = (sum - sequences * by_chance.mean()) / std::sqrt(sequences * by_chance.variance());
    CAPTURE(z);
    CHECK(std::abs(z) < 5);
  }
}

TEST_CASE("random: an eviction at each step keeps the best draws of all tokens so far") {
  constexpr int prompt = 60, budget = 32, steps = 40;
  OnText run("random", {{"every", std::int64_t{1}}, {"seed", std::int64_t{7}}}, budget, prompt + steps);
  run.prefill(prompt);
  for (int i = 0; i < steps; ++i) run.step();
  for (int layer = 0; layer < run.config().layers; ++layer)
    for (int head = 0; head < run.config().kv_heads; ++head) {
      CAPTURE(layer, head);
      CHECK(run.kept(layer, head) ==
            best(draws(7, 0, layer, head, prompt + steps), positions_to(prompt + steps), budget));
    }
}

TEST_CASE("random: redraw gives other draws at another time, and the same ones again") {
  Draws cache(1, 16);
  const std::map<std::string, ParamValue> lasting{}, anew{{"redraw", true}};
  const auto draw = [&](const std::map<std::string, ParamValue>& params, int position) {
    cache.position = position;
    return cache.by(params)[0];
  };
  CHECK(draw(lasting, 16) == draw(lasting, 17));
  CHECK(draw(anew, 16) != draw(anew, 17));
  CHECK(draw(anew, 17) == draw(anew, 17));
}

TEST_CASE("random: keep_prompt keeps the whole prompt and draws among what came after it") {
  constexpr int prompt = 40, budget = 48, steps = 30;
  OnText run("random", {{"keep_prompt", true}}, budget, prompt + steps);
  run.prefill(prompt);
  for (int i = 0; i < steps; ++i) run.step();
  for (int layer = 0; layer < run.config().layers; ++layer)
    for (int head = 0; head < run.config().kv_heads; ++head) {
      CAPTURE(layer, head);
      std::vector<double> wanted = draws(0, 0, layer, head, prompt + steps);
      for (int p = 0; p < prompt; ++p) wanted[static_cast<std::size_t>(p)] = INFINITY;
      CHECK(run.kept(layer, head) == best(wanted, positions_to(prompt + steps), budget));
    }
}

TEST_CASE("random: keep_prompt refuses budgets that cannot hold a prompt") {
  Draws cache(1, 48);
  cache.position = 41;  // the first decode step
  for (const int budget : {39, 40}) {
    cache.budget = budget;
    if (budget == 40)
      CHECK_NOTHROW(cache.by({{"keep_prompt", true}}));
    else
      CHECK_THROWS_WITH(cache.by({{"keep_prompt", true}}), Catch::Matchers::Contains("at least the 40 of the prompt"));
  }
  HeapWorkspace w;
  Registry registry;
  const PluginInfo& info = registry.require(Role::scorer, "random");
  const auto scorer = create<Scorer>(info, resolve(info, {{"keep_prompt", true}}));
  CHECK_THROWS_WITH(scorer->attach({}, {BudgetAmount::ratio, 0.5}, w), Catch::Matchers::Contains("a share"));
}

TEST_CASE("random: sinks and recent tokens take their part of the budget") {
  OnText run("random", {{"sinks", std::int64_t{4}}, {"recent", std::int64_t{40}}}, 32, 64);
  run.prefill(64);
  std::vector<int> wanted = positions_to(4);
  for (int p = 36; p < 64; ++p) wanted.push_back(p);
  CHECK(run.kept(0, 0) == wanted);
}
