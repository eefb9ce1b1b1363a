#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr int prompt = 130, steps = 3;
using Row = std::vector<double>;

OnText run_with(double start, double t, double exact, const std::string& retained = "threshold") {
  return OnText(Role::policy, "minicache", {{"start", start}, {"t", t}, {"exact", exact}, {"retained", retained}}, 0,
                prompt + steps, 16);
}

// The tokens that stay: as many as a share of them, or those in the upper share of the range of distances.
std::set<int> staying(const std::vector<double>& distance, double exact, const std::string& retained) {
  if (retained == "count") {
    const auto most = best(distance, positions_to(static_cast<int>(distance.size())),
                           static_cast<std::size_t>(std::ceil(exact * static_cast<double>(distance.size()))));
    return {most.begin(), most.end()};
  }
  const auto [least, greatest] = std::minmax_element(distance.begin(), distance.end());
  std::set<int> stay;
  for (std::size_t i = 0; i < distance.size(); ++i)
    if (distance[i] > *least + (*greatest - *least) * (1 - exact)) stay.insert(static_cast<int>(i));
  return stay;
}

double length(const Row& x) { return std::sqrt(dot(x, x)); }

// What a plain implementation makes of a token's rows of two layers, of which `a` is the former one.
std::pair<Row, Row> merged(const Row& a, const Row& b, double t) {
  const double cosine = dot(a, b) / length(a) / length(b), angle = std::acos(cosine);
  Row direction;
  for (std::size_t d = 0; d < a.size(); ++d)
    direction.push_back(std::sin((1 - t) * angle) / std::sin(angle) * a[d] / length(a) +
                        std::sin(t * angle) / std::sin(angle) * b[d] / length(b));
  const double norm = length(direction);
  std::pair<Row, Row> out;
  for (const double x : direction)
    out.first.push_back(x / norm * length(a)), out.second.push_back(x / norm * length(b));
  return out;
}

const SeenRows& rows_of(const OnText& run, int layer, KvSide side) {
  return side == KvSide::key ? run.layer(layer).keys : run.layer(layer).values;
}

}  // namespace

TEST_CASE("minicache: the card's token") {
  const auto [former, own] = merged({0, 3}, {2, 0}, .6);
  CHECK(own[0] == Approx(1.6180).margin(1e-4));
  CHECK(own[1] == Approx(1.1756).margin(1e-4));
  CHECK(former[0] == Approx(2.4271).margin(1e-4));
  CHECK(former[1] == Approx(1.7634).margin(1e-4));
}

TEST_CASE("minicache: which tokens stay, by hand") {
  const std::vector<double> distance{.1, .5, .47, .3, .2};
  CHECK(staying(distance, .05, "threshold") == std::set<int>{1});  // above .48
  CHECK(staying(distance, .1, "threshold") == std::set<int>{1, 2});
  CHECK(staying(distance, .05, "count") == std::set<int>{1});
  CHECK(staying(distance, .5, "count") == std::set<int>{1, 2, 3});
}

TEST_CASE("minicache holds of real text what a plain implementation holds") {
  const double exact = GENERATE(0.05, 0., 1.), t = GENERATE(0.6, 0.3), start = GENERATE(0.5, 0.4, 1.);
  const std::string retained = GENERATE("threshold", "count");
  CAPTURE(exact, t, start, retained);
  OnText run = run_with(start, t, exact, retained);
  run.prefill(prompt);
  for (int i = 0; i < steps; ++i) run.step();
  const int layers = run.config().layers, first = std::min(static_cast<int>(layers * start), layers - 2);
  REQUIRE(layers == 8);
  std::size_t differ = 0, tokens = 0;
  for (int layer = 0; layer < layers; ++layer)
    for (int head = 0; head < run.config().kv_heads; ++head)
      for (const KvSide side : {KvSide::key, KvSide::value}) {
        CAPTURE(layer, head, static_cast<int>(side));
        const auto h = static_cast<std::size_t>(head);
        const bool second = layer >= first && (layer - first) % 2 == 1,
                   in_pair = second || (layer >= first && layer + 1 < layers);
        const auto& a = rows_of(run, second ? layer - 1 : layer, side).at;
        const auto& b = rows_of(run, second || !in_pair ? layer : layer + 1, side).at;
        std::vector<double> distance;
        for (int i = 0; i < prompt; ++i) {
          const auto p = static_cast<std::size_t>(i);
          distance.push_back(std::acos(std::min(1., dot(a[p][h], b[p][h]) / length(a[p][h]) / length(b[p][h]))));
        }
        const std::set<int> stay = staying(distance, exact, retained);
        const auto got = run.stored(side, layer, head);
        REQUIRE(got.size() == prompt + steps);
        for (std::size_t p = 0; p < got.size(); ++p) {
          const Row& own = rows_of(run, layer, side).at[p][h];
          const bool whole = !in_pair || static_cast<int>(p) >= prompt || stay.count(static_cast<int>(p));
          const auto both = whole ? std::pair(own, own) : merged(a[p][h], b[p][h], t);
          const Row& wanted = second ? both.second : both.first;
          double off = 0;
          for (std::size_t d = 0; d < wanted.size(); ++d) off = std::max(off, std::abs(double{got[p][d]} - wanted[d]));
          ++tokens;
          differ += !(off <= (whole ? 0 : 1e-5 * (1 + length(own))));
        }
      }
  CHECK(tokens > 1000);
  CHECK(differ == 0);
}

// What the first prompt merged points in one direction, and stays. The rest is merged as in one prompt.
TEST_CASE("minicache merges what a second prompt and the steps before it added") {
  constexpr int first = 80, between = 3, second = 40, all = first + between + second;
  const double exact = GENERATE(0., 0.05);
  const std::string retained = GENERATE("threshold", "count");
  CAPTURE(exact, retained);
  OnText run = run_with(0.5, .6, exact, retained);
  run.prefill(first);
  for (int i = 0; i < between; ++i) run.step();
  OnText before = run_with(0.5, .6, exact, retained);
  before.prefill(first);
  run.prefill(second);
  std::size_t differ = 0, merged_now = 0;
  for (int layer = run.config().layers / 2; layer + 1 < run.config().layers; layer += 2)
    for (int head = 0; head < run.config().kv_heads; ++head)
      for (const KvSide side : {KvSide::key, KvSide::value}) {
        const auto h = static_cast<std::size_t>(head);
        std::vector<Row> rows[2];  // of the pair's layers, before the second prompt's end
        for (const int i : {0, 1}) {
          for (const auto& row : before.stored(side, layer + i, head)) rows[i].emplace_back(row.begin(), row.end());
          for (std::size_t t = first; t < all; ++t) rows[i].push_back(rows_of(run, layer + i, side).at[t][h]);
        }
        std::vector<double> distance;
        for (std::size_t t = 0; t < all; ++t)
          distance.push_back(
              std::acos(std::min(1., dot(rows[0][t], rows[1][t]) / length(rows[0][t]) / length(rows[1][t]))));
        const std::set<int> stay = staying(distance, exact, retained);
        const auto a = run.stored(side, layer, head), b = run.stored(side, layer + 1, head);
        REQUIRE(a.size() == all);
        for (std::size_t t = 0; t < all; ++t) {
          const bool whole = stay.count(static_cast<int>(t)) || distance[t] < 1e-3;
          merged_now += !whole;
          const auto wanted = whole ? std::pair(rows[0][t], rows[1][t]) : merged(rows[0][t], rows[1][t], .6);
          double off = 0;
          for (std::size_t d = 0; d < wanted.first.size(); ++d)
            off = std::max({off, std::abs(double{a[t][d]} - wanted.first[d]) / (1 + length(rows[0][t])),
                            std::abs(double{b[t][d]} - wanted.second[d]) / (1 + length(rows[1][t]))});
          differ += !(off <= 1e-5);
        }
      }
  CHECK(merged_now > 100);
  CHECK(differ == 0);
}

TEST_CASE("minicache: what it cannot obey is refused") {
  using Catch::Contains;
  CHECK_THROWS_WITH(run_with(0.5, 1.1, 0.05), Contains("minicache.t: got 1.1, wanted a number from 0 to 1"));
  CHECK_THROWS_WITH(run_with(1.5, 0.6, 0), Contains("minicache.start: got 1.5"));
  CHECK_THROWS_WITH(run_with(0.5, 0.6, -0.1), Contains("minicache.exact: got -0.1"));
}
