#include "base/cpu_use.hpp"

#include <catch2/catch.hpp>
#include <cmath>
#include <ctime>
#include <sstream>
#include <string>

using namespace kvlab;

TEST_CASE("busy ticks are of the CPUs named, without idle, iowait and guests") {
  const std::string text =
      "cpu  111 1 1 900 90 1 1 1 50 50\n"
      "cpu0 10 20 30 1000 500 1 2 3 10 20\n"
      "cpu1 100 0 0 77 0 0 0 0 0 0\n"
      "cpu10 7 0 0 0 0 0 0 0 0 0\n"
      "intr 12345\n";
  const auto of = [&](const std::vector<int>& cpus) {
    std::istringstream in(text);
    return busy_ticks(in, cpus);
  };
  CHECK(of({0}) == 66);
  CHECK(of({1}) == 100);
  CHECK(of({0, 1, 10}) == 173);
  CHECK(std::isnan(of({2})));
  std::istringstream nothing("");
  CHECK(std::isnan(busy_ticks(nothing, {0})));
}

TEST_CASE("what others used is what all used less our own, and nothing when ticks are coarser") {
  CpuUse begin, end;
  begin.wall = 10;
  end.wall = 12;
  begin.all = 100;
  end.all = 103;
  begin.own = 1;
  end.own = 2.5;
  CHECK(other_cores(begin, end) == Approx(0.75));
  end.own = 4.5;
  CHECK(other_cores(begin, end) == 0);
  end.all = std::nan("");
  CHECK(std::isnan(other_cores(begin, end)));
  CHECK(std::isnan(other_cores(begin, begin)));
}

TEST_CASE("waits are summed over the threads that are still there") {
  CHECK(waited({{1, 2.0}, {3, 1.0}, {4, 9.0}}, {{1, 2.5}, {2, 0.25}, {3, 1.0}}) == Approx(0.75));
  CHECK(std::isnan(waited({}, {{1, 1.0}})));
  CHECK(waited({{1, 5.0}}, {{1, 1.0}}) == 0);  // another thread got the number
}

TEST_CASE("our own use is counted") {
  const CpuUse begin = cpu_use();
  const std::clock_t start = std::clock();
  volatile double sink = 0;
  while (std::clock() - start < CLOCKS_PER_SEC / 20) sink = sink + 1;
  const CpuUse end = cpu_use();
  CHECK(end.own - begin.own >= 0.05);
  CHECK(end.wall > begin.wall);
  CHECK(end.involuntary >= begin.involuntary);
}
