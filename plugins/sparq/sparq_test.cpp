#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr int prompt = 160, steps = 24, tokens = 20;

struct Rule {
  std::size_t rank = 16;  // a quarter of head_dim
  int local = 4;          // of 19 tokens beside the step's own
  bool norm_scale = true;
};

// The scores of keys by the rank largest components of a group's queries.
std::vector<double> scores_of(const std::vector<std::vector<double>>& queries,
                              const std::vector<std::vector<double>>& keys, const Rule& rule) {
  const std::size_t dim = queries[0].size();
  std::vector<double> size(dim), scores(keys.size());
  for (const auto& q : queries)
    for (std::size_t d = 0; d < dim; ++d) size[d] += std::abs(q[d]);
  const std::vector<int> largest = best(size, positions_to(static_cast<int>(dim)), rule.rank);
  for (const auto& q : queries) {
    double all = 0, large = 0;
    for (const double x : q) all += std::abs(x);
    for (const int d : largest) large += std::abs(q[static_cast<std::size_t>(d)]);
    const double scale = rule.norm_scale ? std::sqrt(static_cast<double>(dim) * large / all) : 1;
    for (std::size_t t = 0; t < keys.size(); ++t)
      for (const int d : largest)
        scores[t] += q[static_cast<std::size_t>(d)] * keys[t][static_cast<std::size_t>(d)] / scale;
  }
  return scores;
}

void check_reads(const std::map<std::string, ParamValue>& params, const Rule& rule) {
  OnText run(Role::policy, "sparq", params, tokens, prompt + steps, 8);
  run.prefill(prompt);
  for (int step = 0; step < steps; ++step) {
    run.step();
    const int seen = prompt + step + 1;
    for (int layer = 0; layer < run.config().layers; ++layer)
      for (int head = 0; head < run.config().kv_heads; ++head) {
        CAPTURE(step, layer, head);
        const auto& here = run.layer(layer);
        const auto& of_step = here.queries.at.back();
        std::vector<std::vector<double>> keys;
        for (const auto& heads : here.keys.at) keys.push_back(heads[static_cast<std::size_t>(head)]);
        auto scores =
            scores_of({of_step.begin() + head * run.group(), of_step.begin() + (head + 1) * run.group()}, keys, rule);
        std::fill(scores.end() - rule.local - 1, scores.end(), INFINITY);
        std::vector<int> read = here.read[static_cast<std::size_t>(step)][static_cast<std::size_t>(head)];
        std::sort(read.begin(), read.end());
        CHECK(read == best(scores, positions_to(seen), tokens));
      }
  }
}

}  // namespace

// Channels 0 and 1 are the largest, and sqrt(4 * 3 / 3.5) divides their products.
TEST_CASE("sparq: the card's scores") {
  const auto scores = scores_of({{2, -1, .5, 0}}, {{1, 0, 0, 0}, {0, -2, 0, 0}, {-1, 0, 4, 0}}, {.rank = 2});
  CHECK(scores[0] == Approx(1.0801).epsilon(1e-4));
  CHECK(scores[1] == Approx(1.0801).epsilon(1e-4));
  CHECK(scores[2] == Approx(-1.0801).epsilon(1e-4));
  CHECK(best(scores, positions_to(3), 2) == std::vector<int>{0, 1});
}

TEST_CASE("sparq reads on real text what a plain implementation reads") {
  check_reads({}, {});
  check_reads({{"rank", std::int64_t{5}}, {"local", 0.}}, {.rank = 5, .local = 0});
  check_reads({{"rank", std::int64_t{3}}, {"norm_scale", false}}, {.rank = 3, .norm_scale = false});
  check_reads({{"key_copy", false}}, {});
  check_reads({{"key_copy", false}, {"rank", std::int64_t{5}}, {"local", 0.}}, {.rank = 5, .local = 0});
}

TEST_CASE("sparq: dense layers, short prompts, and what it cannot obey") {
  const auto first_read = [](std::map<std::string, ParamValue> params, int of_prompt) {
    OnText run(Role::policy, "sparq", params, tokens, 64, 8);
    run.prefill(of_prompt);
    run.step();
    return std::pair{run.layer(0).read[0], run.layer(1).read[0]};
  };
  const auto dense = first_read({{"dense_layers", std::int64_t{1}}}, 40);
  CHECK(dense.first.empty());
  CHECK(dense.second[0].size() == tokens);
  CHECK(first_read({}, 3).first[0].size() == 4);
  CHECK(first_read({}, 19).first[0].size() == tokens);
  CHECK_THROWS_WITH(OnText(Role::policy, "sparq", {{"rank", std::int64_t{65}}}, tokens, 64, 8),
                    Catch::Contains("got rank 65, wanted at most head_dim, 64"));
}
