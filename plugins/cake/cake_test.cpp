#include "support/scored_steps.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

using Settings = std::map<std::string, ParamValue>;

// Scores of a prompt whose last two queries give the tokens these shares. Query i looks at element i of the keys, so a
// key holds the logarithms of its shares.
std::vector<double> scores(const std::vector<std::pair<double, double>>& shares, const Settings& more) {
  PagedFixture cache({1, 1, 8, 4, 4});
  for (const auto& [first, second] : shares) {
    std::vector<float> k(8);
    k[0] = static_cast<float>(std::log(first)), k[1] = static_cast<float>(std::log(second));
    cache.append(0, 0, k, k);
  }
  std::vector<float> queries(16);
  queries[0] = queries[9] = std::sqrt(8.f);
  Scored scored(cache, 1);
  scored.kv.window_queries = View<const float, 4>::dense(queries.data(), {1, 1, 2, 8});
  Settings params = more;
  params["window"] = std::int64_t{2};
  return scored.by("cake", params);
}

constexpr double none = 1e-30;

}  // namespace

TEST_CASE("cake: mean and variance of two queries by hand") {
  // The first query does not see the last token. Both leave .2 to the window.
  const auto both = scores({{.6, .2}, {.2, .6}, {.2, .1}, {.2, .1}}, {{"clustering", false}});
  CHECK(both[0] == Approx(16.4).epsilon(1e-4));
  CHECK(both[1] == Approx(16.4).epsilon(1e-4));
  const auto mean = scores({{.6, .2}, {.2, .6}, {.2, .1}, {.2, .1}}, {{"variance", false}, {"clustering", false}});
  CHECK(mean[0] == Approx(.4));
  CHECK(mean[1] == Approx(.4));
}

TEST_CASE("cake: attention that comes and goes outranks steady attention") {
  // Means .3, .2, .0, .2: the variances are 0, .08, 0 and .08.
  const auto s =
      scores({{.3, .3}, {.4, none}, {none, none}, {none, .4}, {.3, .15}, {.3, .15}}, {{"clustering", false}});
  CHECK(s[0] == Approx(.3).epsilon(1e-3));
  CHECK(s[1] == Approx(16.2).epsilon(1e-3));
  CHECK(std::abs(s[2]) < 1e-3);
  CHECK(s[3] == Approx(16.2).epsilon(1e-3));
  // Averages of three neighbours, where zeros lie outside of the tokens before the window.
  const auto pooled =
      scores({{.3, .3}, {.4, none}, {none, none}, {none, .4}, {.3, .15}, {.3, .15}}, {{"kernel", std::int64_t{3}}});
  CHECK(pooled[0] == Approx(16.5 / 3).epsilon(1e-3));
  CHECK(pooled[2] == Approx(32.4 / 3).epsilon(1e-3));
  CHECK(pooled[3] == Approx(16.2 / 3).epsilon(1e-3));
}

TEST_CASE("cake: a decode step ranks by its own attention alone") {
  ScoredSteps run("cake", {{"window", std::int64_t{2}}}, 2);
  run.prompt(3);
  run.step({.125f, .25f, .25f, .375f, .375f, .125f, .25f, .25f});
  CHECK(run.scores() == std::vector<float>{.25f, .1875f, .25f, .3125f});
}

TEST_CASE("cake refuses an even kernel") {
  CHECK_THROWS_WITH(ScoredSteps("cake", {{"kernel", std::int64_t{4}}}),
                    Catch::Contains("got kernel 4, wanted an odd number"));
}
