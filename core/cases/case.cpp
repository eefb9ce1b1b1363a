#include "cases/case.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace kvlab::cases {
namespace {

std::vector<std::vector<Case> (*)()>& lists() {
  static std::vector<std::vector<Case> (*)()> of_ops;
  return of_ops;
}

double difference(float got, float wanted) {
  if (got == wanted || (std::isnan(got) && std::isnan(wanted))) return 0;
  const double d = std::abs(double{got} - wanted);
  return std::isfinite(d) ? d / std::max(1.0, std::abs(double{wanted})) : INFINITY;
}

}  // namespace

void Check::report(const std::string& what, const std::string& how) {
  constexpr int most = 12;
  if (differences_ < most) text_ += fmt::format("{}{}: {}\n", prefix_, what, how);
  if (differences_++ == most) text_ += "and more\n";
}

void Check::equal(const std::string& what, const std::vector<float>& got, const std::vector<float>& wanted,
                  double most) {
  ++made_;
  if (got.size() != wanted.size())
    return report(what, fmt::format("got {} values, wanted {}", got.size(), wanted.size()));
  std::size_t worst = 0, bad = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (difference(got[i], wanted[i]) > difference(got[worst], wanted[worst])) worst = i;
    bad += difference(got[i], wanted[i]) > most;
  }
  if (bad)
    report(what, fmt::format("{} of {} values differ by more than {}; the worst is number {}: got {}, wanted {}", bad,
                             got.size(), most, worst, got[worst], wanted[worst]));
}

void Check::equal(const std::string& what, const std::vector<std::int32_t>& got,
                  const std::vector<std::int32_t>& wanted) {
  ++made_;
  if (got.size() != wanted.size())
    return report(what, fmt::format("got {} values, wanted {}", got.size(), wanted.size()));
  const auto at = std::mismatch(got.begin(), got.end(), wanted.begin());
  if (at.first != got.end())
    report(what, fmt::format("number {}: got {}, wanted {}", at.first - got.begin(), *at.first, *at.second));
}

void Check::within(const std::string& what, double got, double most) {
  ++made_;
  if (!(got <= most)) report(what, fmt::format("got a distance of {}, wanted at most {}", got, most));
}

void Check::that(const std::string& what, bool holds) {
  ++made_;
  if (!holds) report(what, "does not hold");
}

int copies_beyond(double bytes, double beyond, int most) {
  return static_cast<int>(std::clamp(std::ceil(beyond / std::max(bytes, 1.0)), 1.0, static_cast<double>(most)));
}

Announced::Announced(std::vector<Case> (*list)()) { lists().push_back(list); }

const std::vector<Case>& all() {
  static const std::vector<Case> cases = [] {
    std::vector<Case> v;
    for (const auto list : lists())
      for (Case& c : list()) v.push_back(std::move(c));
    std::stable_sort(v.begin(), v.end(), [](const Case& a, const Case& b) { return a.op < b.op; });
    return v;
  }();
  return cases;
}

std::optional<std::string> check(const Case& c, Device device) {
  Place place(device);
  Check check;
  const auto scene = c.make(place, 1);
  if (!scene) return std::nullopt;
  scene->check(check);
  check.that("memory around inputs and outputs is as it was", place.margins_intact());
  return check.text();
}

}  // namespace kvlab::cases
