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

// The tokens that stay of those with these scores, beside `last` newest ones: the second stage of any scorer.
std::vector<int> kept_by_scores(const std::vector<float>& scores, const std::vector<float>& norms, int keep, int last,
                                const Settings& settings) {
  static Registry registry;
  PagedFixture cache({1, 1, 8, 4, 4});
  for (const float norm : norms) cache.append(0, 0, std::vector<float>(8, 0.f), std::vector<float>(8, norm));
  Scored scored(cache, 1);
  const Norms projection;
  scored.kv.projection = &projection;
  Scratch scratch;
  scored.kv.workspace = &scratch;
  Guarded<3> ranks({1, 1, scored.kv.max_length});
  for (std::size_t t = 0; t < scores.size(); ++t) ranks.view()(0, 0, static_cast<std::int64_t>(t)) = scores[t];
  const auto second = create<Rescorer>(registry.require(Role::rescorer, "criticalkv"),
                                       resolve(registry.require(Role::rescorer, "criticalkv"), settings));
  const std::int32_t tokens = keep;
  second->rescore(scored.kv, {.last = last}, View<const std::int32_t, 2>::dense(&tokens, {1, 1}), ranks.view(),
                  Stream::cpu());
  std::vector<double> of;
  for (std::size_t t = 0; t + static_cast<std::size_t>(last) < scores.size(); ++t)
    of.push_back(ranks.view()(0, 0, static_cast<std::int64_t>(t)));
  return best(of, positions_to(static_cast<int>(of.size())), static_cast<std::size_t>(keep - last));
}

// Sizes of a head's projected values at text positions below `end`.
std::vector<double> projected(const OnText& run, int layer, int head, int end) {
  const ModelConfig& c = run.config();
  std::vector<float> row(static_cast<std::size_t>(c.heads * c.head_dim));
  std::vector<double> norms(static_cast<std::size_t>(end));
  for (int h = head * run.group(); h < (head + 1) * run.group(); ++h)
    for (int n = 0; n < c.hidden; ++n) {
      run.model().layers[static_cast<std::size_t>(layer)].output.row(n, row.data());
      for (std::size_t t = 0; t < norms.size(); ++t) {
        const auto& v = run.layer(layer).values.at[t][static_cast<std::size_t>(head)];
        double sum = 0;
        for (std::size_t d = 0; d < v.size(); ++d) sum += v[d] * row[static_cast<std::size_t>(h) * v.size() + d];
        norms[t] += std::abs(sum) / run.group();
      }
    }
  return norms;
}

// The last queries' attention to the tokens before them, mean over the group.
std::vector<double> votes(const OnText& run, int layer, int head, int prompt, int window) {
  std::vector<double> sum(static_cast<std::size_t>(prompt - window));
  for (int h = head * run.group(); h < (head + 1) * run.group(); ++h)
    for (const auto& shares : window_shares(run, layer, h, prompt, window))
      for (std::size_t t = 0; t < sum.size(); ++t) sum[t] += shares[t] / run.group();
  return sum;
}

// The two stages of scores of tokens without the pinned ones, which are the last. keep: pins included.
std::vector<int> two_stages(const std::vector<double>& scores, const std::vector<double>& norms, std::size_t keep,
                            std::size_t pinned, double share) {
  std::vector<double> second;
  for (std::size_t t = 0; t < scores.size(); ++t) second.push_back((scores[t] + 1e-4) * norms[t]);
  const int n = static_cast<int>(scores.size());
  const std::size_t free = keep - pinned;
  for (const int t : best(scores, positions_to(n), static_cast<std::size_t>(share * static_cast<double>(free))))
    second[static_cast<std::size_t>(t)] = INFINITY;
  auto wanted = best(second, positions_to(n), free);
  for (int t = n; t < n + static_cast<int>(pinned); ++t) wanted.push_back(t);
  return wanted;
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
  // With the window, half of three and half of four. The window's own token takes one of them.
  const Settings with_window{{"window_in_first_stage", true}};
  CHECK(kept(shares, norms, 2, with_window) == std::vector<int>{2, 3});
  CHECK(kept(shares, norms, 3, with_window) == std::vector<int>{0, 2, 3});
  CHECK(kept({.5f, .3f, .15f, .05f, .04f}, {1, 1, 1, 10, 20}, 3, with_window) == std::vector<int>{0, 3, 4});
  // A token of no attention counts by epsilon times its size alone.
  CHECK(kept({.5f, .3f, 1e-20f, .15f}, {1, 1, 1e6f, 1}, 2, {}) == std::vector<int>{0, 2});
  CHECK(kept({.5f, .3f, 1e-20f, .15f}, {1, 1, 1e6f, 1}, 2, {{"epsilon", 0.}}) == std::vector<int>{0, 1});
}

TEST_CASE("criticalkv keeps on real text what a plain implementation keeps") {
  constexpr int prompt = 150, budget = 40, window = 8;
  OnText run(Role::scorer, "criticalkv", {{"window", std::int64_t{window}}, {"clustering", false}}, budget, prompt + 4,
             16);
  run.prefill(prompt);
  for (int layer = 0; layer < run.config().layers; ++layer)
    for (int head = 0; head < run.config().kv_heads; ++head) {
      CAPTURE(layer, head);
      CHECK(run.kept(layer, head) == two_stages(votes(run, layer, head, prompt, window),
                                                projected(run, layer, head, prompt - window), budget, window, .5));
    }
}

TEST_CASE("criticalkv: the second stage of other scorers by hand") {
  const std::vector<float> scores = {.5f, .3f, .15f, .05f}, norms = {1, 1, 4, 10};
  CHECK(kept_by_scores(scores, norms, 2, 0, {}) == std::vector<int>{0, 2});
  CHECK(kept_by_scores(scores, norms, 2, 0, {{"first_stage", 1.}}) == std::vector<int>{0, 1});
  CHECK(kept_by_scores(scores, norms, 2, 0, {{"first_stage", 0.}}) == std::vector<int>{2, 3});
  CHECK(kept_by_scores(scores, norms, 3, 0, {}) == std::vector<int>{0, 2, 3});
  // The newest token is pinned and has the best score. It is none of the first stage.
  CHECK(kept_by_scores({.5f, .3f, .15f, .05f, 9}, {1, 1, 4, 10, 1}, 3, 1, {}) == std::vector<int>{0, 2});
  // Scores below 0: those of the first stage stay all the same.
  CHECK(kept_by_scores({-1, -2, -3, -4}, norms, 2, 0, {}) == std::vector<int>{0, 1});
  CHECK(kept_by_scores({-1, -2, -3, -1.5f}, {1, 4, .1f, 10}, 2, 0, {}) == std::vector<int>{0, 2});
  CHECK(kept_by_scores({.5f, 0, 0, .3f}, {1, 1, 1e6f, 1}, 2, 0, {}) == std::vector<int>{0, 2});
  CHECK(kept_by_scores({.5f, 0, 0, .3f}, {1, 1, 1e6f, 1}, 2, 0, {{"epsilon", 0.}}) == std::vector<int>{0, 3});
}

TEST_CASE("criticalkv ranks anew on real text what other scorers and divisions give each head") {
  constexpr int prompt = 150, budget = 40, window = 8;
  const Settings snapkv{{"window", std::int64_t{window}}, {"clustering", false}};
  const auto second = [](double share) {
    return OnText::Second{Role::rescorer, "criticalkv", {{"first_stage", share}}};
  };
  bool divided = false;
  for (const char* split : {"", "adakv", "zigzagkv"})
    for (const double share : {.5, .25}) {
      std::optional<OnText::Split> how;
      if (*split) how = OnText::Split{split, {}};
      // What a head keeps does not depend on the second stage.
      OnText first(Role::scorer, "snapkv", snapkv, budget, prompt + 4, 16, OnText::MakeProfile(), how);
      OnText run(Role::scorer, "snapkv", snapkv, budget, prompt + 4, 16, second(share), how);
      first.prefill(prompt), run.prefill(prompt);
      int others = 0;
      for (int layer = 0; layer < run.config().layers; ++layer)
        for (int head = 0; head < run.config().kv_heads; ++head) {
          CAPTURE(split, share, layer, head);
          const std::vector<int> by_attention = first.kept(layer, head);
          divided = divided || by_attention.size() != budget;
          const auto wanted =
              two_stages(votes(run, layer, head, prompt, window), projected(run, layer, head, prompt - window),
                         by_attention.size(), window, share);
          CHECK(run.kept(layer, head) == wanted);
          others += wanted != by_attention;
        }
      CHECK(others > 0);
      run.step();
    }
  CHECK(divided);

  // A scorer without pins, whose scores are below 0. In layer 0 equal tokens tie.
  OnText run(Role::scorer, "knorm", {}, budget, prompt + 4, 16, second(.5));
  run.prefill(prompt);
  for (int layer = 1; layer < run.config().layers; ++layer)
    for (int head = 0; head < run.config().kv_heads; ++head) {
      CAPTURE(layer, head);
      std::vector<double> scores;
      for (int t = 0; t < prompt; ++t) {
        const auto& key = run.layer(layer).keys.at[static_cast<std::size_t>(t)][static_cast<std::size_t>(head)];
        scores.push_back(-std::sqrt(dot(key, key)));
      }
      CHECK(run.kept(layer, head) == two_stages(scores, projected(run, layer, head, prompt), budget, 0, .5));
    }
}

TEST_CASE("criticalkv: decode steps rank by the scorer alone") {
  constexpr int prompt = 100, budget = 40;
  OnText run(Role::scorer, "knorm", {{"every", std::int64_t{1}}}, budget, prompt + 8, 16,
             OnText::Second{Role::rescorer, "criticalkv", {{"first_stage", 0.}}});
  run.prefill(prompt);
  std::vector<int> wanted = run.kept(0, 0);
  const auto scores = [&](const std::vector<int>& of) {
    std::vector<double> out;
    for (const int t : of) {
      const auto& key = run.layer(0).keys.at[static_cast<std::size_t>(t)][0];
      out.push_back(-std::sqrt(dot(key, key)));
    }
    return out;
  };
  const std::vector<int> all = positions_to(prompt);
  CHECK(wanted.size() == budget);
  CHECK(wanted != best(scores(all), all, budget));
  for (int t = prompt; t < prompt + 8; ++t) {
    run.step();
    wanted.push_back(t);
    wanted = best(scores(wanted), wanted, budget);
  }
  CHECK(run.kept(0, 0) == wanted);
}

TEST_CASE("criticalkv refuses an even kernel") {
  CHECK_THROWS_WITH(OnText(Role::scorer, "criticalkv", {{"kernel", std::int64_t{4}}}, 40, 100, 16),
                    Catch::Contains("got kernel 4, wanted an odd number"));
}
