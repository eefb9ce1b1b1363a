#include "support/on_text.hpp"
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

// Plain pages of one KV head: text positions, oldest first, and the steps since the stamp, of which `far` is none.
struct Page {
  Ints tokens;
  double stamp = 0;
};

struct Plain {
  static constexpr double far = 1e30;
  int page = 8, most = 40;
  double threshold = .05;
  bool keep_prompt = true, stamps = true;
  std::vector<Page> pages;

  int tokens() const {
    int n = 0;
    for (const Page& p : pages) n += static_cast<int>(p.tokens.size());
    return n;
  }
  Ints kept() const {
    Ints all;
    for (const Page& p : pages) all.insert(all.end(), p.tokens.begin(), p.tokens.end());
    std::sort(all.begin(), all.end());
    return all;
  }
  void begin(const Ints& positions, double stamp) {
    for (std::size_t i = 0; i < positions.size(); ++i) {
      if (i % static_cast<std::size_t>(page) == 0) pages.push_back({{}, stamp});
      pages.back().tokens.push_back(positions[i]);
    }
  }
  void evict() {
    const int whole = most / page * page;
    while (tokens() % page == 0 && tokens() > whole - page) {
      const auto oldest = std::min_element(pages.begin(), pages.end(), [](const Page& a, const Page& b) {
        return std::pair(a.stamp, a.tokens.back()) < std::pair(b.stamp, b.tokens.back());
      });
      pages.erase(oldest);
    }
  }
  // shares: of each page's bound, the newest token's page included.
  void stamp(const std::vector<double>& shares) {
    for (std::size_t i = 0; i < pages.size(); ++i) {
      if (pages[i].stamp == far) continue;
      pages[i].stamp = stamps && shares[i] > threshold ? 0 : pages[i].stamp - 1;
    }
    if (pages.back().stamp != far) pages.back().stamp = 0;
  }
  void append(int position) {
    if (pages.empty() || static_cast<int>(pages.back().tokens.size()) == page) pages.push_back({});
    pages.back().tokens.push_back(position);
  }
};

// The mean over a group of the softmax over pages of Quest's bounds.
std::vector<double> page_shares(const OnText& run, const OnText::Layer& layer, int head, const Plain& plain) {
  std::vector<double> mean(plain.pages.size());
  for (int g = head * run.group(); g < (head + 1) * run.group(); ++g) {
    const auto& q = layer.queries.at.back()[static_cast<std::size_t>(g)];
    std::vector<double> bounds;
    for (const Page& page : plain.pages) {
      double bound = 0;
      for (std::size_t d = 0; d < q.size(); ++d) {
        double greatest = -INFINITY;
        for (const int t : page.tokens)
          greatest =
              std::max(greatest, q[d] * layer.keys.at[static_cast<std::size_t>(t)][static_cast<std::size_t>(head)][d]);
        bound += greatest;
      }
      bounds.push_back(bound);
    }
    const std::vector<double> shares = softmax(bounds);
    for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += shares[i] / run.group();
  }
  return mean;
}

void check_pages(const Settings& params, Plain rule, int prompt, int steps, int dense = 0) {
  OnText run(Role::policy, "raas", params, rule.most, prompt + steps, rule.page);
  run.prefill(prompt);
  const int fits = rule.most / rule.page * rule.page - rule.page;
  std::vector<Plain> heads;
  int left = 0;
  for (int step = 0; step <= steps; ++step) {
    if (step > 0) run.step();
    for (int l = 0; l < run.config().layers; ++l)
      for (int h = 0; h < run.config().kv_heads; ++h) {
        CAPTURE(step, l, h);
        const auto& layer = run.layer(l);
        if (l < dense) {
          if (step == 0) heads.push_back(rule);
          CHECK(run.kept(l, h) == positions_to(prompt + step));
          continue;
        }
        if (step == 0) {
          std::vector<double> attention(static_cast<std::size_t>(prompt));
          for (int g = h * run.group(); g < (h + 1) * run.group(); ++g) {
            const auto shares = window_shares(run, l, g, prompt, 1);
            for (std::size_t t = 0; t < attention.size(); ++t) attention[t] += shares[0][t];
          }
          heads.push_back(rule);
          const bool whole = prompt <= fits || (prompt <= fits + rule.page && prompt % rule.page);
          heads.back().begin(
              whole ? positions_to(prompt) : best(attention, positions_to(prompt), static_cast<std::size_t>(fits)),
              rule.keep_prompt && prompt <= fits ? Plain::far : 0);
        } else {
          Plain& plain = heads[static_cast<std::size_t>(l * run.config().kv_heads + h)];
          plain.append(prompt + step - 1);
          plain.stamp(page_shares(run, layer, h, plain));
          const int before = plain.tokens();
          plain.evict();
          left += plain.tokens() < before;
        }
        CHECK(run.kept(l, h) == heads[static_cast<std::size_t>(l * run.config().kv_heads + h)].kept());
      }
  }
  CHECK(left > 0);
}

}  // namespace

TEST_CASE("raas: the card's stamps, by hand") {
  Plain p{.page = 1, .most = 4, .threshold = 1e-4};
  p.pages = {{{0}, 7}, {{1}, 3}, {{2}, 9}, {{3}, 3}};
  p.evict();  // the first of the oldest stamps
  CHECK(p.kept() == Ints{0, 2, 3});
  // Stamps are those of step 12, counted from it: what mattered has 0.
  p.pages = {{{0}, -5}, {{1}, -4}, {{2}, -3}, {{3}, -1}};
  p.stamp({.6, .39995, .00005, 0});
  CHECK(p.pages[0].stamp == 0);
  CHECK(p.pages[1].stamp == 0);
  CHECK(p.pages[2].stamp == -4);
  CHECK(p.pages[3].stamp == 0);  // the newest page
}

TEST_CASE("raas keeps on real text the pages that a plain implementation keeps") {
  const std::pair<const std::string, ParamValue> threshold{"threshold", .05};
  check_pages({threshold}, {}, 20, 40);  // the prompt stays
  check_pages({threshold, {"keep_prompt", false}}, {.keep_prompt = false}, 20, 40);
  check_pages({threshold, {"stamps", false}, {"keep_prompt", false}}, {.keep_prompt = false, .stamps = false}, 20, 40);
  check_pages({threshold}, {.most = 44}, 130, 24);  // the prompt is cut
  check_pages({threshold, {"dense_layers", std::int64_t{2}}}, {}, 37, 24, 2);
  check_pages({threshold}, {}, 37, 24);  // it fits, but its pages do not stay
}

TEST_CASE("raas: a budget below what it keeps is refused") {
  CHECK_THROWS_WITH(OnText(Role::policy, "raas", {{"sinks", std::int64_t{3}}}, 23, 64, 8), Catch::Contains("24"));
}

TEST_CASE("raas_tokens: what has more than the threshold gets a new stamp, by hand") {
  ScoredSteps run("raas_tokens", {{"keep_prompt", false}});
  run.prompt(3);
  run.step({.6f, .39995f, .00005f, 0});
  CHECK(ages(run) == Ints{0, 0, 1, 0});  // the new token has a stamp, though nobody has looked at it
  run.step({.9999f, 1e-4f, 0, 0, 0});    // the threshold itself is no more than the threshold
  CHECK(ages(run) == Ints{0, 1, 2, 1, 0});
}

TEST_CASE("raas_tokens: the oldest stamp leaves, of equal ones the first token, by hand") {
  // In the end the stamps are 2 steps old, 6, 0, 6 and 0.
  ScoredSteps run("raas_tokens", {{"keep_prompt", false}, {"threshold", .4}});
  run.prompt(4);
  for (int i = 0; i < 6; ++i) {
    std::vector<float> row(static_cast<std::size_t>(5 + i));
    row[i < 4 ? 0 : 2] = 1;
    run.step(row);
  }
  CHECK(ages(run) == Ints{2, 6, 0, 6, 5, 4, 3, 2, 1, 0});
  CHECK(run.kept(9) == Ints{0, 2, 3, 4, 5, 6, 7, 8, 9});
}

TEST_CASE("raas_tokens: a prompt that fits stays, one that does not has stamps as other tokens") {
  for (const int budget : {2, 4}) {
    ScoredSteps run("raas_tokens", {});
    run.prompt(3, budget);
    run.step({0, 0, 0, 1});
    run.step({0, 0, 0, 0, 1});
    CHECK(ages(run) == (budget < 3 ? Ints{2, 2, 2, 1, 0} : Ints{-1, -1, -1, 1, 0}));
    CHECK(run.kept(4) == (budget < 3 ? Ints{1, 2, 3, 4} : Ints{0, 1, 2, 4}));
  }
}

TEST_CASE("raas_tokens: without stamps the first in is the first out, and a group has a mean or a maximum") {
  ScoredSteps first_in("raas_tokens", {{"keep_prompt", false}, {"stamps", false}});
  first_in.prompt(1);
  first_in.step({1, 0});
  first_in.step({1, 0, 0});
  CHECK(ages(first_in) == Ints{2, 1, 0});
  for (const std::string group : {"mean", "max"}) {
    ScoredSteps run("raas_tokens", {{"keep_prompt", false}, {"group", group}, {"threshold", .35}}, 2);
    run.prompt(2);
    run.step({.5f, .5f, 0, .1f, .9f, 0});
    CHECK(ages(run) == (group == "mean" ? Ints{1, 0, 0} : Ints{0, 0, 0}));
  }
  CHECK_THROWS_WITH(ScoredSteps("raas_tokens", {{"group", std::string("sum")}}),
                    Catch::Contains("got group sum, wanted mean or max"));
}
