#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr int prompt = 150, steps = 4;

OnText run_with(double ratio, int window, int recent, int tokens = prompt + steps) {
  return OnText(Role::policy, "think",
                {{"ratio", ratio}, {"window", std::int64_t{window}}, {"recent", std::int64_t{recent}}}, 0, tokens, 16);
}

// The channels that a plain implementation takes away. They have the least mean q^2 over the last queries and the
// group, times mean k^2 over all keys of the prompt.
std::set<std::size_t> lost(const OnText& run, int layer, int head, int n, int window, double ratio) {
  const auto& seen = run.layer(layer);
  const auto h = static_cast<std::size_t>(head), group = static_cast<std::size_t>(run.group());
  const std::size_t dim = seen.keys.at[0][h].size();
  std::vector<double> score(dim);
  std::vector<int> channels;
  for (std::size_t d = 0; d < dim; ++d) {
    double q = 0, k = 0;
    int queries = 0;
    for (int t = std::max(0, n - window); t < n; ++t)
      for (std::size_t g = 0; g < group; ++g, ++queries)
        q += std::pow(seen.queries.at[static_cast<std::size_t>(t)][h * group + g][d], 2);
    for (int t = 0; t < n; ++t) k += std::pow(seen.keys.at[static_cast<std::size_t>(t)][h][d], 2);
    score[d] = -(q / queries) * (k / n);
    channels.push_back(static_cast<int>(d));
  }
  std::set<std::size_t> out;
  for (const int d : best(score, channels, static_cast<std::size_t>(static_cast<double>(dim) * ratio)))
    out.insert(static_cast<std::size_t>(d));
  return out;
}

}  // namespace

TEST_CASE("think takes from real text's keys the channels that a plain implementation takes, and nothing else") {
  const double ratio = GENERATE(0.4, 0.75);
  const int window = GENERATE(32, 5), recent = GENERATE(32, 0);
  CAPTURE(ratio, window, recent);
  OnText run = run_with(ratio, window, recent);
  run.prefill(prompt);
  for (int i = 0; i < steps; ++i) run.step();
  std::set<std::set<std::size_t>> different;
  for (int layer = 0; layer < run.config().layers; ++layer)
    for (int head = 0; head < run.config().kv_heads; ++head) {
      CAPTURE(layer, head);
      const auto gone = lost(run, layer, head, prompt, window, ratio);
      different.insert(gone);
      const auto keys = run.stored(KvSide::key, layer, head), values = run.stored(KvSide::value, layer, head);
      REQUIRE(keys.size() == prompt + steps);
      std::size_t wrong = 0;
      for (std::size_t t = 0; t < keys.size(); ++t)
        for (std::size_t d = 0; d < keys[t].size(); ++d) {
          const bool zero = static_cast<int>(t) < prompt - recent && gone.count(d);
          wrong += double{keys[t][d]} != (zero ? 0 : run.layer(layer).keys.at[t][static_cast<std::size_t>(head)][d]);
          wrong += double{values[t][d]} != run.layer(layer).values.at[t][static_cast<std::size_t>(head)][d];
        }
      CHECK(wrong == 0);
      CHECK(run.kept(layer, head) == positions_to(prompt + steps));
    }
  CHECK(different.size() > 10);
}

// The second prompt's channels follow from its queries and from the keys that the first one left.
TEST_CASE("think prunes again at the end of a second prompt") {
  constexpr int first = 90, between = 3, second = 40, all = first + between + second, window = 32, recent = 8;
  OnText run = run_with(0.4, window, recent, all);
  run.prefill(first);
  for (int i = 0; i < between; ++i) run.step();
  OnText whole = run_with(0.4, window, recent, all);
  whole.prefill(first);
  run.prefill(second);
  for (int layer = 0; layer < run.config().layers; ++layer)
    for (int head = 0; head < run.config().kv_heads; ++head) {
      CAPTURE(layer, head);
      const auto& seen = run.layer(layer);
      const auto h = static_cast<std::size_t>(head), group = static_cast<std::size_t>(run.group());
      std::vector<std::vector<float>> wanted = whole.stored(KvSide::key, layer, head);
      for (std::size_t t = first; t < all; ++t)
        wanted.emplace_back(seen.keys.at[t][h].begin(), seen.keys.at[t][h].end());
      const std::size_t dim = wanted[0].size();
      std::vector<double> score(dim);
      for (std::size_t d = 0; d < dim; ++d) {
        double q = 0, k = 0;
        for (std::size_t t = all - window; t < all; ++t)
          for (std::size_t g = 0; g < group; ++g) q += std::pow(seen.queries.at[t][h * group + g][d], 2);
        for (const auto& key : wanted) k += std::pow(double{key[d]}, 2);
        score[d] = -q * k;
      }
      for (const int d : best(score, positions_to(static_cast<int>(dim)), dim * 4 / 10))
        for (std::size_t t = 0; t < all - recent; ++t) wanted[t][static_cast<std::size_t>(d)] = 0;
      CHECK(run.stored(KvSide::key, layer, head) == wanted);
    }
}

TEST_CASE("think: the number of channels is rounded down, and a prompt of recent keys stays whole") {
  const auto zeros = [](double ratio, int recent, int tokens) {
    OnText run = run_with(ratio, 32, recent);
    run.prefill(tokens);
    std::size_t count = 0;
    const auto keys = run.stored(KvSide::key, 3, 0);
    for (const float x : keys[0]) count += x == 0;
    return count;
  };
  const std::size_t dim = OnText(Role::policy, "think", {}, 0, 8, 16).config().head_dim;
  CHECK(zeros(0.3, 32, 100) == dim * 3 / 10);
  CHECK(zeros(0, 32, 100) == 0);
  CHECK(zeros(0.4, 32, 32) == 0);
  CHECK(zeros(0.4, 32, 33) == dim * 4 / 10);
  CHECK(zeros(0.4, 0, 1) == dim * 4 / 10);
}

TEST_CASE("think: its cache is as large as the full one") {
  OnText run = run_with(0.4, 32, 32);
  run.prefill(prompt);
  OnText whole = run_with(0, 32, 32);
  whole.prefill(prompt);
  for (const Tag tag : {Tag::keys, Tag::values})
    CHECK(run.ledger().held(Tier::device)[static_cast<std::size_t>(tag)] ==
          whole.ledger().held(Tier::device)[static_cast<std::size_t>(tag)]);
}

TEST_CASE("think: what it cannot obey is refused") {
  using Catch::Contains;
  CHECK_THROWS_WITH(run_with(1, 32, 32), Contains("got ratio 1, wanted less"));
  CHECK_THROWS_WITH(run_with(-0.1, 32, 32), Contains("think.ratio: got -0.1"));
  CHECK_THROWS_WITH(run_with(0.4, 0, 32), Contains("think.window: got 0"));
  CHECK_THROWS_WITH(run_with(0.4, 32, -1), Contains("think.recent: got -1"));
  CHECK_THROWS_WITH(OnText(Role::policy, "think", {}, 16, 64, 16), Contains("got a budget for a policy that decides"));
}
