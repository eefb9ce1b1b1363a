// The compensation token, beside plain attention over the tokens that a head keeps and the mean of those that it
// dropped.
#include "support/recorded.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

using Row = std::vector<double>;

std::map<std::string, ParamValue> params(int sinks, int window, std::map<std::string, ParamValue> more = {}) {
  more.insert({{"sinks", std::int64_t{sinks}}, {"window", std::int64_t{window}}, {"window_share", 0.}});
  return more;
}

// Attention of the query at text position p to these positions and to the mean of others, which counts as so many.
Row attention(const Recorded::Layer& l, std::size_t p, int query_head, int kv_head, const std::vector<int>& read,
              const std::vector<int>& dropped) {
  const Row& q = l.queries.at[p][static_cast<std::size_t>(query_head)];
  const auto of = [&](const SeenRows& rows, int t) {
    return rows.at[static_cast<std::size_t>(t)][static_cast<std::size_t>(kv_head)];
  };
  const auto weight = [&](const Row& key) { return std::exp(dot(q, key) / std::sqrt(static_cast<double>(q.size()))); };
  Row out(q.size(), 0), key(q.size(), 0), value(q.size(), 0);
  double total = 0;
  const auto add = [&](const Row& v, double w) {
    total += w;
    for (std::size_t d = 0; d < out.size(); ++d) out[d] += w * v[d];
  };
  for (const int t : read) add(of(l.values, t), weight(of(l.keys, t)));
  const auto count = static_cast<double>(dropped.size());
  for (const int t : dropped)
    for (std::size_t d = 0; d < out.size(); ++d)
      key[d] += of(l.keys, t)[d] / count, value[d] += of(l.values, t)[d] / count;
  if (!dropped.empty()) add(value, count * weight(key));
  for (double& x : out) x /= total;
  return out;
}

// Checks the outputs of the step at text position p. `seen`: the tokens when the head last dropped some. Returns the
// number of query heads whose output the token changes.
int check_step(const Recorded& run, int p, int sinks, int window, int seen, bool compensated,
               const std::function<bool(int, int)>& whole) {
  const int group = run.config().heads / run.config().kv_heads;
  int changed = 0;
  for (int layer = 0; layer < run.config().layers; ++layer)
    for (int head = 0; head < run.config().heads; ++head) {
      CAPTURE(p, layer, head);
      std::vector<int> read, dropped;
      for (int t = 0; t <= p; ++t)
        (t < sinks || t >= seen - window || whole(layer, head / group) ? read : dropped).push_back(t);
      const Recorded::Layer& l = run.layers[static_cast<std::size_t>(layer)];
      const auto at = static_cast<std::size_t>(p);
      const Row& got = l.outputs.at[at][static_cast<std::size_t>(head)];
      REQUIRE(farthest(got, attention(l, at, head, head / group, read, compensated ? dropped : std::vector<int>())) <
              1e-4);
      changed +=
          farthest(got, attention(l, at, head, head / group, read, compensated ? std::vector<int>() : dropped)) > 1e-3;
    }
  return changed;
}

bool none(int, int) { return false; }

}  // namespace

// The card: of 10 tokens 0, 1, 7, 8 and 9 stay, and the mean of 2 to 6 counts five times. Then it grows by one a step.
TEST_CASE("razor_attention: the compensation token of the card's case, and as it grows") {
  Recorded run("razor_attention", params(2, 3, {{"retrieval_heads", false}}), {}, 32);
  run.prefill(10);
  for (int p = 10; p < 20; ++p) {
    run.step();
    CHECK(check_step(run, p, 2, 3, p, true, none) > 0);
  }
}

TEST_CASE("razor_attention: the compensation token of a longer text") {
  const bool decodes = GENERATE(true, false), compensated = GENERATE(true, false);
  CAPTURE(decodes, compensated);
  constexpr int prompt = 90, steps = 20, sinks = 4, window = 20;
  const auto whole = [](int layer, int head) { return layer == 1 && head == 0; };
  ModelConfig config;
  Profile profile;
  {
    const auto model = load_model(*open_model("bundled/recall", "", ""), DType::f32, "recall");
    config = model->config;
  }
  for (const char* name : {"echo", "induction"}) {
    ProfileArray& scores = profile[name];
    scores.extent = {config.layers, config.kv_heads};
    for (int l = 0; l < config.layers; ++l)
      for (int h = 0; h < config.kv_heads; ++h) scores.values.push_back(whole(l, h) ? 1.f : 0.f);
  }
  const double one = 1. / (config.layers * config.kv_heads);
  const auto given = params(
      sinks, window, {{"induction", one}, {"echo", 0.}, {"while_decoding", decodes}, {"compensation", compensated}});
  Recorded run("razor_attention", given, profile, prompt + 2 * steps);
  run.prefill(prompt);
  for (int p = prompt; p < prompt + steps; ++p) {
    run.step();
    CHECK(check_step(run, p, sinks, window, decodes ? p : prompt, compensated, whole) > 0);
  }
  // A saved sequence keeps its compensation tokens.
  Recorded later("razor_attention", given, profile, prompt + 2 * steps);
  later.layers = run.layers;
  later.restore(run.save(), prompt + steps);
  for (int p = prompt + steps; p < prompt + steps + 3; ++p) {
    later.step();
    CHECK(check_step(later, p, sinks, window, decodes ? p : prompt, compensated, whole) > 0);
  }
}
