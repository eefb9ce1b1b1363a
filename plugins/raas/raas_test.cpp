#include "support/scored_steps.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

using Ints = std::vector<int>;
using Settings = std::map<std::string, ParamValue>;

// Steps since each token's stamp; -1 = it is never evicted.
Ints ages(ScoredSteps& run) {
  Ints out;
  for (const float s : run.scores()) out.push_back(s > 1e20f ? -1 : static_cast<int>(std::ceil(-s)));
  return out;
}

}  // namespace

TEST_CASE("raas: what has more than the threshold gets a new stamp, by hand") {
  ScoredSteps run("raas", {{"keep_prompt", false}});
  run.prompt(3);
  run.step({.6f, .39995f, .00005f, 0});
  CHECK(ages(run) == Ints{0, 0, 1, 0});  // the new token has a stamp, though nobody has looked at it
  run.step({.9999f, 1e-4f, 0, 0, 0});    // the threshold itself is no more than the threshold
  CHECK(ages(run) == Ints{0, 1, 2, 1, 0});
}

TEST_CASE("raas: the oldest stamp leaves, of equal ones the first token, by hand") {
  // In the end the stamps are 2 steps old, 6, 0, 6 and 0.
  ScoredSteps run("raas", {{"keep_prompt", false}, {"threshold", .4}});
  run.prompt(4);
  for (int i = 0; i < 6; ++i) {
    std::vector<float> row(static_cast<std::size_t>(5 + i));
    row[i < 4 ? 0 : 2] = 1;
    run.step(row);
  }
  CHECK(ages(run) == Ints{2, 6, 0, 6, 5, 4, 3, 2, 1, 0});
  CHECK(run.kept(9) == Ints{0, 2, 3, 4, 5, 6, 7, 8, 9});
}

TEST_CASE("raas: a prompt that fits stays, one that does not has stamps as other tokens") {
  for (const int budget : {2, 4}) {
    ScoredSteps run("raas", {});
    run.prompt(3, budget);
    run.step({0, 0, 0, 1});
    run.step({0, 0, 0, 0, 1});
    CHECK(ages(run) == (budget < 3 ? Ints{2, 2, 2, 1, 0} : Ints{-1, -1, -1, 1, 0}));
    CHECK(run.kept(4) == (budget < 3 ? Ints{1, 2, 3, 4} : Ints{0, 1, 2, 4}));
  }
}

TEST_CASE("raas: without stamps the first in is the first out, and a group has a mean or a maximum") {
  ScoredSteps first_in("raas", {{"keep_prompt", false}, {"stamps", false}});
  first_in.prompt(1);
  first_in.step({1, 0});
  first_in.step({1, 0, 0});
  CHECK(ages(first_in) == Ints{2, 1, 0});
  for (const std::string group : {"mean", "max"}) {
    ScoredSteps run("raas", {{"keep_prompt", false}, {"group", group}, {"threshold", .35}}, 2);
    run.prompt(2);
    run.step({.5f, .5f, 0, .1f, .9f, 0});
    CHECK(ages(run) == (group == "mean" ? Ints{1, 0, 0} : Ints{0, 0, 0}));
  }
  CHECK_THROWS_WITH(ScoredSteps("raas", {{"group", std::string("sum")}}),
                    Catch::Contains("got group sum, wanted mean or max"));
}
