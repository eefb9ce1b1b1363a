#include "base/part_timer.hpp"

#include <catch2/catch.hpp>
#include <numeric>
#include <thread>

using namespace kvlab;

namespace {

void pass(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }
double of(const PartClock::Step& s, Part p) { return s.parts[static_cast<std::size_t>(p)]; }

}  // namespace

TEST_CASE("parts of a step exclude each other and add up to it, on the host's clock") {
  PartClock clock;
  pass(4);
  {
    const PartTimer score(Part::score);
    pass(8);
    const PartTimer select(Part::select);
    pass(12);
  }
  const auto step = clock.take(), next = clock.take();
  CHECK(of(step, Part::other) >= 0.004);
  CHECK(of(step, Part::score) >= 0.008);
  CHECK(of(step, Part::select) >= 0.012);
  CHECK(of(step, Part::score) < step.seconds - 0.015);
  CHECK(of(step, Part::gemm) == 0);
  CHECK(std::accumulate(step.parts.begin(), step.parts.end(), 0.) == Approx(step.seconds));
  CHECK(of(next, Part::score) == 0);
  CHECK(of(next, Part::select) == 0);
}

TEST_CASE("a clock within another takes the time, and gives the place back") {
  PartClock outer;
  {
    PartClock inner;
    const PartTimer timer(Part::attend);
    pass(2);
    CHECK(of(inner.take(), Part::attend) >= 0.002);
  }
  { const PartTimer timer(Part::append); }
  const auto step = outer.take();
  CHECK(of(step, Part::attend) == 0);
  CHECK(of(step, Part::append) > 0);
}
