#include "support/scored_steps.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

using Ints = std::vector<int>;
using Settings = std::map<std::string, ParamValue>;

Settings params(std::int64_t window, std::int64_t recent, std::int64_t drop) {
  return {{"window", window}, {"recent", recent}, {"drop", drop}};
}

// How many of the window's queries found each token unimportant.
Ints counts(ScoredSteps& run) {
  Ints out;
  for (const float s : run.scores()) out.push_back(static_cast<int>(std::ceil(-s)));
  return out;
}

}  // namespace

TEST_CASE("scissorhands: three queries by hand, and a share of 1 / tokens is important") {
  ScoredSteps run("scissorhands", params(3, 2, 3));
  run.prompt(3);
  run.step({.5f, .1f, .3f, .1f});
  run.step({.4f, .1f, .1f, .2f, .2f});
  run.step({.3f, .05f, .25f, .1f, .1f, .2f});
  CHECK(counts(run) == Ints{0, 3, 1, 2, 1, 0});
  CHECK(run.kept(4) == Ints{0, 2, 4, 5});
}

TEST_CASE("scissorhands: of equal counts the newer token stays") {
  ScoredSteps run("scissorhands", params(3, 0, 3));
  run.prompt(5);  // no share is below 1 / tokens
  CHECK(counts(run) == Ints{0, 0, 0, 0, 0});
  CHECK(run.kept(2) == Ints{3, 4});
}

TEST_CASE("scissorhands: the window is one part of the steps between drops, or several of them") {
  // Before the second drop: a window of 2 in 3 steps, then of 6, which reaches back over the first drop.
  struct Case {
    int window;
    Ints counts;
  };
  for (const Case& c : {Case{2, {0, 2, 0, 0}}, {3, {0, 2, 1, 0}}, {6, {1, 2, 3, 0}}}) {
    CAPTURE(c.window);
    ScoredSteps run("scissorhands", params(c.window, 0, 3));
    run.prompt(1);
    const std::vector<std::vector<float>> rows = {{.1f, .9f},
                                                  {.5f, .5f, 0},
                                                  {.4f, .3f, .1f, .2f},  // .2 is below 1 / 4
                                                  {.5f, .3f, .1f, .1f, 0},
                                                  {.4f, 0, .3f, .3f, 0, 0},
                                                  {.4f, 0, .3f, .3f, 0, 0, 0}};
    for (const auto& row : rows) run.step(row);
    Ints all = counts(run);
    all[3] = 0, all.resize(4);
    CHECK(all == c.counts);
  }
}

TEST_CASE("scissorhands: a group's mean counts, or each head") {
  for (const bool each : {false, true}) {
    Settings p = params(1, 0, 1);
    p["each_head"] = each;
    ScoredSteps run("scissorhands", p, 2);
    run.prompt(1);
    run.step({.9f, .1f, .3f, .7f});  // the mean is .6 and .4
    CHECK(counts(run) == (each ? Ints{1, 1} : Ints{0, 1}));
  }
}

TEST_CASE("scissorhands refuses a window that is no whole number of drops, and one of too many") {
  CHECK_THROWS_WITH(ScoredSteps("scissorhands", params(400, 10, 128)),
                    Catch::Contains("got window 400 with drop 128, wanted a window of at most drop, or of 2 to 64"));
  CHECK_THROWS_WITH(ScoredSteps("scissorhands", params(400, 10, 1)), Catch::Contains("got window 400 with drop 1,"));
}
