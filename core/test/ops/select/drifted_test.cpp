// What an injection makes of checks of drift.
#include "ops/select/drifted.hpp"

#include <catch2/catch.hpp>
#include <cmath>

using namespace kvlab;

namespace {

// Steps of a leader whose list of 10 tokens stays the best. A check comes in every fifth one.
struct Steps {
  float missed[5] = {};
  ops::DriftRule rule{.threshold = .5f, .window = 5, .period = 5};
  bool rests = false;

  ops::Watched step(int left, ops::InjectedChecks injected) {
    const ops::Watched w = ops::watch_step(rule, missed, 10, rests ? -1 : 0, left, injected);
    rests = w.rests;
    return w;
  }
};

}  // namespace

TEST_CASE("an injected check finds drift, and has the scores of its step") {
  Steps plain, injected;
  for (int left = 4; left > 1; --left) {
    CHECK_FALSE(plain.step(left, {}).drifted);
    CHECK_FALSE(injected.step(left, {true, true, true}).drifted);  // these draws are of steps without a check
    CHECK(plain.rests == (left == 2));                             // three overlaps of 1 decide the median of five
    CHECK(injected.rests == plain.rests);
  }
  plain.step(1, {}), injected.step(1, {true, false, true});
  CHECK(plain.rests);
  CHECK_FALSE(injected.rests);
  CHECK_FALSE(plain.step(0, {}).drifted);
  CHECK(injected.step(0, {true, true, false}).drifted);
  for (const float missed : injected.missed) CHECK(missed == 0);  // the new list begins anew
  CHECK_FALSE(Steps().step(0, {true, false, true}).drifted);
}

TEST_CASE("an injected draw replaces drift that the scores show") {
  Steps far;
  for (float& x : far.missed) x = 9;
  CHECK(Steps(far).step(0, {}).drifted);
  CHECK_FALSE(Steps(far).step(0, {true, false, false}).drifted);
}

TEST_CASE("the injected share of leaders drifts, by sequence, layer, head and step") {
  const std::uint32_t sequence[] = {4, 5};
  for (const double share : {0., .041, .3, 1.}) {
    CAPTURE(share);
    const ops::InjectedDrift drift{static_cast<std::int32_t>(std::lround(share * 1e6)), sequence, 3, 9};
    int count = 0, all = 0;
    for (int step = 0; step < 4000; ++step)
      for (int slot = 0; slot < 2; ++slot)
        for (int head = 0; head < 4; ++head, ++all) count += drift.drifts(slot, head, step);
    CHECK(static_cast<double>(count) / all == Approx(share).margin(4 * std::sqrt(share * (1 - share) / all)));
  }
  const auto draws = [&](std::uint32_t number, int layer, int head, std::uint64_t seed) {
    const ops::InjectedDrift drift{500'000, &number, layer, seed};
    std::uint64_t bits = 0;
    for (int step = 0; step < 64; ++step) bits = bits << 1 | drift.drifts(0, head, step);
    return bits;
  };
  const std::uint64_t some = draws(4, 3, 1, 9);
  CHECK(some == draws(4, 3, 1, 9));
  for (const std::uint64_t other : {draws(5, 3, 1, 9), draws(4, 2, 1, 9), draws(4, 3, 2, 9), draws(4, 3, 1, 8)})
    CHECK(some != other);
}
