#include <deque>

#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

using Settings = std::map<std::string, ParamValue>;

// Gives every token the norm that stands in the first element of its value.
struct Norms final : OutputProjection {
  void norms(const LayerKv& kv, Scores out, Stream s) const override {
    Guarded<4> values({1, kv.kv_heads(), kv.max_length, kv.pages.head_dim});
    ops::read_rows(kv.values, values.view(), s);
    for (int t = 0; t < kv.max_length; ++t) out(0, 0, t) = values.view()(0, 0, t, 0);
  }
};

// Scratch in which nothing shares memory. HeapWorkspace gives both parts of a list the same.
class Scratch final : public Workspace {
 public:
  void* scratch(const char*, std::size_t bytes) override { return blocks_.emplace_back(bytes + 64).data(); }
  void* state(const char*, std::size_t bytes_per_slot, int slots) override {
    return scratch("", bytes_per_slot * static_cast<std::size_t>(slots));
  }
  const void* constant(const char*, const void* from, std::size_t bytes) override {
    return std::memcpy(scratch("", bytes), from, bytes);
  }

 private:
  std::deque<std::vector<std::byte>> blocks_;
};

// The tokens that stay of those that the last query gives these shares, beside that query's own token.
std::vector<int> kept(const std::vector<float>& shares, const std::vector<float>& norms, int budget, Settings more) {
  PagedFixture cache({1, 1, 8, 4, 4});
  const auto append = [&](float share, float norm) {
    std::vector<float> k(8), v(8);
    k[0] = std::log(share), v[0] = norm;
    cache.append(0, 0, k, v);
  };
  for (std::size_t t = 0; t < shares.size(); ++t) append(shares[t], norms[t]);
  append(1, 1);
  std::vector<float> query(8);
  query[0] = std::sqrt(8.f);
  Scored scored(cache, 1);
  const Norms projection;
  scored.kv.projection = &projection;
  Scratch scratch;
  scored.kv.workspace = &scratch;
  scored.kv.window_queries = View<const float, 4>::dense(query.data(), {1, 1, 1, 8});
  const std::int32_t tokens = budget + 1;
  scored.kv.budget = &tokens;
  more["window"] = std::int64_t{1}, more["clustering"] = false;
  auto scores = scored.by("criticalkv", more);
  CHECK(scored.pins.last == 1);
  scores.pop_back();
  return best(scores, positions_to(static_cast<int>(scores.size())), static_cast<std::size_t>(budget));
}

}  // namespace

TEST_CASE("criticalkv: two stages by hand") {
  const std::vector<float> shares = {.5f, .3f, .15f, .05f}, norms = {1, 1, 4, 10};
  CHECK(kept(shares, norms, 2, {}) == std::vector<int>{0, 2});
  CHECK(kept(shares, norms, 2, {{"values", false}}) == std::vector<int>{0, 1});
  CHECK(kept(shares, norms, 2, {{"first_stage", 1.}}) == std::vector<int>{0, 1});
  CHECK(kept(shares, norms, 2, {{"first_stage", 0.}}) == std::vector<int>{2, 3});
  // Half of three is one.
  CHECK(kept(shares, norms, 3, {}) == std::vector<int>{0, 2, 3});
  // A token of no attention counts by epsilon times its size alone.
  CHECK(kept({.5f, .3f, 1e-20f, .15f}, {1, 1, 1e6f, 1}, 2, {}) == std::vector<int>{0, 2});
  CHECK(kept({.5f, .3f, 1e-20f, .15f}, {1, 1, 1e6f, 1}, 2, {{"epsilon", 0.}}) == std::vector<int>{0, 1});
}

TEST_CASE("criticalkv keeps on real text what a plain implementation keeps") {
  constexpr int prompt = 150, budget = 40, window = 8;
  OnText run(Role::scorer, "criticalkv", {{"window", std::int64_t{window}}, {"clustering", false}}, budget, prompt + 4,
             16);
  run.prefill(prompt);
  const ModelConfig& c = run.config();
  std::vector<float> row(static_cast<std::size_t>(c.heads * c.head_dim));
  for (int layer = 0; layer < c.layers; ++layer)
    for (int head = 0; head < c.kv_heads; ++head) {
      CAPTURE(layer, head);
      std::vector<double> votes(prompt - window), norms(votes.size());
      for (int h = head * run.group(); h < (head + 1) * run.group(); ++h) {
        for (const auto& shares : window_shares(run, layer, h, prompt, window))
          for (std::size_t t = 0; t < votes.size(); ++t) votes[t] += shares[t] / run.group();
        for (int n = 0; n < c.hidden; ++n) {
          run.model().layers[static_cast<std::size_t>(layer)].output.row(n, row.data());
          for (std::size_t t = 0; t < votes.size(); ++t) {
            const auto& v = run.layer(layer).values.at[t][static_cast<std::size_t>(head)];
            double sum = 0;
            for (std::size_t d = 0; d < v.size(); ++d) sum += v[d] * row[static_cast<std::size_t>(h) * v.size() + d];
            norms[t] += std::abs(sum) / run.group();
          }
        }
      }
      std::vector<double> second;
      for (std::size_t t = 0; t < votes.size(); ++t) second.push_back((votes[t] + 1e-4) * norms[t]);
      for (const int t : best(votes, positions_to(prompt - window), (budget - window) / 2))
        second[static_cast<std::size_t>(t)] = INFINITY;
      auto wanted = best(second, positions_to(prompt - window), budget - window);
      for (int t = prompt - window; t < prompt; ++t) wanted.push_back(t);
      CHECK(run.kept(layer, head) == wanted);
    }
}

TEST_CASE("criticalkv refuses an even kernel") {
  CHECK_THROWS_WITH(OnText(Role::scorer, "criticalkv", {{"kernel", std::int64_t{4}}}, 40, 100, 16),
                    Catch::Contains("got kernel 4, wanted an odd number"));
}
