#include <kvlab/clusters.hpp>

#include <cstdint>

#include "support/plain_clusters.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr int prompt = 160, steps = 24, sinks = 4, tokens = 40, per_cluster = 9, window = 8, window_clusters = 3,
              page = 8;

using Vector = std::vector<double>;

// At most `most` tokens: whole clusters by score, the last one in part.
std::vector<int> choose(const std::vector<std::vector<int>>& members, const Vector& scores, std::size_t most) {
  std::vector<int> order = positions_to(static_cast<int>(scores.size())), out;
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
  });
  for (const int c : order)
    for (const int t : members[static_cast<std::size_t>(c)])
      if (out.size() < most) out.push_back(t);
  return out;
}

}  // namespace

// Clusters {1, 4}, {2, 3, 6} and {5}; four tokens beside the sink.
TEST_CASE("clusterkv: the card's clusters, by the plain choice and by the op") {
  const std::vector<int> chosen = choose({{1, 4}, {2, 3, 6}, {5}}, {.6, 1., .1}, 4);
  CHECK(chosen == std::vector<int>{2, 3, 6, 1});

  PagedFixture cache({1, 1, 8, 4, 16});
  for (int t = 0; t < 8; ++t) cache.append(0, 0, std::vector<float>(8), std::vector<float>(8), t);
  std::vector<float> centroids(24), scores{.6f, 1, .1f};
  std::vector<std::int32_t> size{2, 3, 1}, token{1, 4, 2, 3, 6, 5, 0, 0}, bound{3, 7}, index(8), count(1), most{4};
  KeyClusters clusters;
  clusters.centroid = View<float, 4>::dense(centroids.data(), {1, 1, 3, 8});
  clusters.size = View<std::int32_t, 3>::dense(size.data(), {1, 1, 3});
  clusters.token = View<std::int32_t, 3>::dense(token.data(), {1, 1, 8});
  clusters.bound = View<std::int32_t, 3>::dense(bound.data(), {1, 1, 2});
  TokenList list;
  list.index = View<std::int32_t, 3>::dense(index.data(), {1, 1, 8});
  list.count = View<std::int32_t, 2>::dense(count.data(), {1, 1});
  ops::cluster_tokens(cache.view(), View<const float, 3>::dense(scores.data(), {1, 1, 3}),
                      View<const std::int32_t, 2>::dense(most.data(), {1, 1}), 1, clusters, list, Stream::cpu());
  index.resize(static_cast<std::size_t>(count[0]));
  CHECK(index == std::vector<std::int32_t>{0, 1, 2, 3, 6, 7});  // 7 is recent
}

TEST_CASE("clusterkv reads on real text what a plain implementation reads") {
  const bool by_number = GENERATE(false, true);
  CAPTURE(by_number);
  constexpr int seed = 5, iterations = 6;
  std::map<std::string, ParamValue> params{{"sinks", std::int64_t{sinks}},
                                           {"iterations", std::int64_t{iterations}},
                                           {"window", std::int64_t{window}},
                                           {"window_clusters", std::int64_t{window_clusters}},
                                           {"dense_layers", std::int64_t{1}},
                                           {"seed", std::int64_t{seed}},
                                           {"offload", true}};
  params[by_number ? "clusters" : "tokens_per_cluster"] = std::int64_t{by_number ? 11 : per_cluster};
  const int count = by_number ? 11 : (prompt - sinks) / per_cluster;
  OnText run(Role::policy, "clusterkv", params, tokens, prompt + steps, page);
  run.prefill(prompt);
  for (int step = 0; step < steps; ++step) run.step();
  for (int layer = 0; layer < run.config().layers; ++layer)
    for (int head = 0; head < run.config().kv_heads; ++head) {
      const auto& here = run.layer(layer);
      const std::uint64_t of_layer = (std::uint64_t{seed} << 16) + static_cast<std::uint64_t>(layer);
      int end = prompt;
      std::vector<PlainCluster> clusters =
          plain_clusters(keys_of(run, layer, head, sinks, end), sinks, count, iterations, of_layer, head);
      for (int step = 0; step < steps; ++step) {
        CAPTURE(layer, head, step);
        if (layer == 0) {
          CHECK(here.read[static_cast<std::size_t>(step)].empty());
          continue;
        }
        if (step > 0 && step % window == 0) {
          for (auto& c : plain_clusters(keys_of(run, layer, head, end, end + window), end, window_clusters, iterations,
                                        of_layer, head))
            clusters.push_back(c);
          end += window;
        }
        Vector scores, query(here.queries.at[0][0].size());
        std::vector<std::vector<int>> members;
        for (int g = 0; g < run.group(); ++g)
          for (std::size_t d = 0; d < query.size(); ++d)
            query[d] +=
                here.queries
                    .at[static_cast<std::size_t>(prompt + step)][static_cast<std::size_t>(head * run.group() + g)][d] /
                run.group();
        for (const PlainCluster& c : clusters) scores.push_back(dot(query, c.centroid)), members.push_back(c.members);
        std::vector<int> wanted = choose(members, scores, tokens - sinks);
        for (int t = 0; t < sinks; ++t) wanted.push_back(t);
        for (int t = end; t <= prompt + step; ++t) wanted.push_back(t);
        std::sort(wanted.begin(), wanted.end());
        CHECK(here.read[static_cast<std::size_t>(step)][static_cast<std::size_t>(head)] == wanted);
        if (step + 1 < steps) continue;
        std::set<int> pages;
        for (const int t : wanted) pages.insert(t / page);
        const auto device = run.pages_on(Tier::device, layer, head), host = run.pages_on(Tier::host, layer, head);
        CHECK(std::set<int>(device.begin(), device.end()) == pages);
        CHECK(device.size() < (prompt + steps) / page);
        CHECK(host.size() >= (prompt + steps - 1) / page);
      }
      CHECK(run.kept(layer, head) == positions_to(prompt + steps));
      if (layer == 0) CHECK(run.pages_on(Tier::host, layer, head).empty());
    }
}

TEST_CASE("clusterkv: without offload all pages stay on the device, and it reads the same") {
  const auto run_with = [](bool offload) {
    auto run =
        std::make_unique<OnText>(Role::policy, "clusterkv",
                                 std::map<std::string, ParamValue>{{"tokens_per_cluster", std::int64_t{per_cluster}},
                                                                   {"sinks", std::int64_t{sinks}},
                                                                   {"dense_layers", std::int64_t{1}},
                                                                   {"offload", offload}},
                                 tokens, prompt + 30, page);
    run->prefill(prompt);
    run->step();
    run->step();
    run->prefill(25);  // the next turn
    run->step();
    return run;
  };
  const auto away = run_with(true), here = run_with(false);
  CHECK(away->ledger().moved_total(Tier::host) > 0);
  CHECK(here->ledger().moved_total(Tier::host) == 0);
  for (int layer = 0; layer < away->config().layers; ++layer) {
    CHECK(away->layer(layer).read == here->layer(layer).read);
    CHECK(away->layer(layer).outputs.at == here->layer(layer).outputs.at);
    CHECK(here->pages_on(Tier::device, layer, 0).size() == (prompt + 28 + page - 1) / page);
  }
}

TEST_CASE("clusterkv: short prompts are read as a whole, and what it cannot obey is refused") {
  const auto read = [](int of_prompt) {
    OnText run(Role::policy, "clusterkv", {{"sinks", std::int64_t{sinks}}, {"clusters", std::int64_t{30}}}, 20, 64, 8);
    run.prefill(of_prompt);
    run.step();
    run.step();
    return run.layer(5).read[1][0].size();
  };
  CHECK(read(1) == 1 + 2);
  CHECK(read(sinks) == sinks + 2);
  CHECK(read(10) == 10 + 2);  // fewer tokens than clusters
  CHECK(read(20) == 20 + 2);
  CHECK(read(21) == 20 + 2);
  CHECK(read(40) == 20 + 2);
  CHECK_THROWS_WITH(OnText(Role::policy, "clusterkv", {}, 16, 64, 8),
                    Catch::Contains("got a budget of 16 tokens, wanted at least 17"));
  CHECK_THROWS_WITH(OnText(Role::policy, "clusterkv", {{"iterations", std::int64_t{-1}}}, 32, 64, 8),
                    Catch::Contains("iterations"));
  const auto clusters = [](std::int64_t count) {
    return OnText(Role::policy, "clusterkv", {{"sinks", std::int64_t{16}}, {"clusters", count}}, 32, 64, 8);
  };
  const auto windows = [](std::int64_t window, std::int64_t count) {
    return OnText(Role::policy, "clusterkv", {{"window", window}, {"window_clusters", count}}, 32, 64, 8);
  };
  CHECK_NOTHROW(windows(9, 9));
  CHECK_NOTHROW(windows(0, 9));  // none become clusters
  CHECK_THROWS_WITH(windows(8, 9), Catch::Contains("got 9 window_clusters, wanted at most 8, the tokens of a window"));
  CHECK_NOTHROW(clusters(48));
  CHECK_THROWS_WITH(clusters(49), Catch::Contains("got 49 clusters, wanted at most 48, the longest sequence less"));
}
