#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr int page = 8, prompt = 200, steps = 20, most_tokens = 64;
using Row = std::vector<double>;

// Each end of a page's box, or its mean, as the codes of the page read: every code is tried.
void put_in_codes(std::vector<Row>& ends) {
  float least = INFINITY, most = -INFINITY;
  for (const Row& end : ends)
    for (const double x : end)
      least = std::min(least, static_cast<float>(x)), most = std::max(most, static_cast<float>(x));
  const float scale = (most - least) * 0x1.010108p-8f;
  const auto number = [&](int code) { return double{static_cast<float>(code) * scale + least}; };
  for (std::size_t e = 0; e < ends.size(); ++e)
    for (double& x : ends[e]) {
      double found = ends.size() == 1 || e == 1 ? INFINITY : -INFINITY;
      for (int code = 0; code < 256; ++code) {
        const double y = number(code);
        if (ends.size() == 1)
          found = std::abs(y - x) < std::abs(found - x) ? y : found;
        else if (e == 0 ? y <= x : y >= x)
          found = e == 0 ? std::max(found, y) : std::min(found, y);
      }
      x = found;
    }
}

// The page's score for each query head of the group; the greatest is the page's.
double score(const OnText::Layer& seen, int position, int head, int group, int p, bool bounds, bool codes) {
  const std::size_t dim = seen.keys.at[0][0].size();
  std::vector<Row> ends(bounds ? 2 : 1, Row(dim));
  const int end = std::min(position + 1, (p + 1) * page);
  for (std::size_t d = 0; d < dim; ++d) {
    double low = INFINITY, high = -INFINITY, sum = 0;
    for (int t = p * page; t < end; ++t) {
      const double x = seen.keys.at[static_cast<std::size_t>(t)][static_cast<std::size_t>(head)][d];
      low = std::min(low, x), high = std::max(high, x), sum += x;
    }
    if (bounds)
      ends[0][d] = low, ends[1][d] = high;
    else
      ends[0][d] = sum / (end - p * page);
  }
  if (codes) put_in_codes(ends);
  double best = -INFINITY;
  for (int g = 0; g < group; ++g) {
    const Row& q = seen.queries.at[static_cast<std::size_t>(position)][static_cast<std::size_t>(head * group + g)];
    double sum = 0;
    for (std::size_t d = 0; d < dim; ++d) sum += std::max(q[d] * ends[0][d], q[d] * ends.back()[d]);
    best = std::max(best, sum);
  }
  return best;
}

}  // namespace

TEST_CASE("quest reads on real text what a plain implementation reads, by bounds and by means, in 16 and in 8 bits") {
  const bool bounds = GENERATE(true, false), codes = GENERATE(false, true);
  CAPTURE(bounds, codes);
  OnText run(Role::selector, "quest",
             {{"dense_layers", std::int64_t{1}},
              {"min_pages", std::int64_t{1}},
              {"page_bounds", bounds},
              {"summary_bits", std::int64_t{codes ? 8 : 16}}},
             most_tokens, prompt + steps, page);
  run.prefill(prompt);
  for (int step = 0; step < steps; ++step) {
    run.step();
    const int position = prompt + step, pages = position / page + 1;
    CHECK(run.layer(0).read[static_cast<std::size_t>(step)].empty());  // the dense layer
    for (int layer = 1; layer < run.config().layers; ++layer)
      for (int head = 0; head < run.config().kv_heads; ++head) {
        CAPTURE(step, layer, head);
        std::vector<double> scores;
        std::vector<int> all;
        for (int p = 0; p < pages; ++p) {
          all.push_back(p);
          scores.push_back(score(run.layer(layer), position, head, run.group(), p, bounds, codes));
          // A bound by codes is no lower than one by numbers.
          if (bounds && codes)
            CHECK(scores.back() >= score(run.layer(layer), position, head, run.group(), p, true, false));
        }
        CHECK(run.layer(layer).read[static_cast<std::size_t>(step)][static_cast<std::size_t>(head)] ==
              best(scores, all, most_tokens / page));
      }
  }
}

TEST_CASE("quest: summaries have 16 or 8 bits, and those of 8 take about a quarter of what f32 takes") {
  const auto made = [](std::int64_t bits) {
    OnText run(Role::selector, "quest", {{"summary_bits", bits}}, most_tokens, prompt + 1, page);
    run.prefill(prompt);
    return run.ledger().held(Tier::device)[static_cast<int>(Tag::summaries)] / run.config().layers /
           run.config().kv_heads / (prompt / page);
  };
  const OnText shape(Role::selector, "quest", {}, most_tokens, 64, page);
  const int dim = shape.config().head_dim;
  CHECK(made(16) == 2 * 4 * dim);  // f32
  CHECK(made(8) == 2 * dim + 16);
  CHECK_THROWS_WITH(made(12), Catch::Contains("got page summaries of 12 bits, wanted 16 or 8"));
}
