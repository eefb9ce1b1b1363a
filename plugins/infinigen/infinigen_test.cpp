#include "base/half.hpp"
#include "support/on_text.hpp"
#include "support/plain_layers.hpp"
#include "support/recall_profile.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr int prompt = 150, steps = 8, page_size = 8;

struct Rule {
  double alpha = 4, ratio = .2;
  int cap = 400;
  double cap_share = 1;
  int dense = 2;
  const Profile* skew = nullptr;
  bool offload = true;
  int room = 0;  // pages

  int most() const { return cap > 0 ? cap : 1 << 30; }
};

// Channel c of a query or a key of a KV head: with a skew, its product with a direction.
double channel_of(const OnText& run, const Rule& rule, int layer, int head, const Vector& x, int c) {
  if (!rule.skew) return x[static_cast<std::size_t>(c)];
  const std::size_t dim = x.size(),
                    at = static_cast<std::size_t>((layer * run.config().kv_heads + head) * run.config().head_dim + c);
  const auto& directions = rule.skew->at("skew").values;
  double sum = 0;
  for (std::size_t d = 0; d < dim; ++d) sum += x[d] * double{directions[at * dim + d]};
  return sum;
}

// Tokens that each head reads beside the step's own. scores: [KV head][token].
std::size_t number_of(const std::vector<Vector>& scores, const Rule& rule) {
  std::size_t all = 0;
  for (const Vector& of_head : scores) {
    const double most = *std::max_element(of_head.begin(), of_head.end());
    for (const double x : of_head) all += x > most - rule.alpha;
  }
  const auto share = static_cast<std::size_t>(rule.cap_share * static_cast<double>(scores[0].size()));
  return std::max<std::size_t>(1, std::min({all / scores.size(), static_cast<std::size_t>(rule.most()), share}));
}

// The channels of a KV head that guess: those of the greatest sums of |q| over the text positions of prompts.
std::vector<int> channels_of(const OnText& run, const Rule& rule, int layer, int head,
                             const std::vector<int>& prompts) {
  const int dim = run.config().head_dim;
  Vector sums(static_cast<std::size_t>(dim));
  for (const int i : prompts)
    for (int g = head * run.group(); g < (head + 1) * run.group(); ++g)
      for (int c = 0; c < dim; ++c)
        sums[static_cast<std::size_t>(c)] += std::abs(
            channel_of(run, rule, layer, head,
                       run.layer(layer).queries.at[static_cast<std::size_t>(i)][static_cast<std::size_t>(g)], c));
  return best(sums, positions_to(dim), static_cast<std::size_t>(std::max(1., rule.ratio * dim)));
}

// [KV head][token] of the tokens before `position`. queries: the guessed ones, one head after the other. Channels of
// keys are stored in f16.
std::vector<Vector> scores_of(const OnText& run, const Rule& rule, int layer, const Vector& queries, int position,
                              const std::vector<std::vector<int>>& channels) {
  const std::ptrdiff_t dim = run.config().head_dim;
  std::vector<Vector> scores;
  for (int h = 0; h < run.config().kv_heads; ++h) {
    const std::vector<int>& few = channels[static_cast<std::size_t>(h)];
    std::vector<Vector> asked;
    for (int g = h * run.group(); g < (h + 1) * run.group(); ++g) {
      const Vector q(queries.begin() + g * dim, queries.begin() + (g + 1) * dim);
      asked.emplace_back();
      for (const int c : few) asked.back().push_back(channel_of(run, rule, layer, h, q, c));
    }
    Vector& of_head = scores.emplace_back(static_cast<std::size_t>(position), -INFINITY);
    for (std::size_t t = 0; t < of_head.size(); ++t) {
      const Vector& key = run.layer(layer).keys.at[t][static_cast<std::size_t>(h)];
      Vector stored;
      for (const int c : few)
        stored.push_back(
            double{half_to_float(float_to_half(static_cast<float>(channel_of(run, rule, layer, h, key, c))))});
      for (const Vector& q : asked)
        of_head[t] = std::max(of_head[t], dot(q, stored) / std::sqrt(static_cast<double>(dim)));
    }
  }
  return scores;
}

// Whether a head's pages lie where they shall after a step of so many tokens: all of a dense layer, else those that it
// read, and others while there is room. The step's append may have added a page.
bool pages_lie_right(const OnText& run, const Rule& rule, int layer, int head, int step, int tokens) {
  const std::vector<int> there = run.pages_on(Tier::device, layer, head);
  const int all = (tokens + page_size - 1) / page_size;
  if (layer < rule.dense || !rule.offload) return static_cast<int>(there.size()) == all;
  std::set<int> read;
  for (const int t : run.layer(layer).read[static_cast<std::size_t>(step)][static_cast<std::size_t>(head)])
    read.insert(t / page_size);
  for (const int page : read)
    if (std::count(there.begin(), there.end(), page) == 0) return false;
  const int room = rule.room > 0 ? rule.room : rule.most() + 1;
  return static_cast<int>(there.size()) <= std::max(room, static_cast<int>(read.size()) + 1) + 1;
}

// Returns the mean share of the text that is read.
double check_reads(std::map<std::string, ParamValue> params, const Rule& rule, int second = 0) {
  params["skew"] = rule.skew != nullptr, params["offload"] = rule.offload;
  const OnText::MakeProfile skew = [&](int, int) { return *rule.skew; };
  OnText run(Role::policy, "infinigen", params, 0, prompt + steps + second + steps, page_size,
             rule.skew ? skew : OnText::MakeProfile());
  std::vector<int> prompts;
  const auto feed = [&](int from, int tokens) {
    run.prefill(tokens);
    for (int i = 0; i < tokens; ++i) prompts.push_back(from + i);
  };
  feed(0, prompt);
  const ModelConfig& c = run.config();
  const int all = second > 0 ? 2 * steps : steps, dense = rule.dense;
  double share = 0;
  for (int step = 0; step < all; ++step) {
    if (step == steps) feed(prompt + steps, second);
    run.step();
    const int position = prompt + step + (step < steps ? 0 : second);
    Vector x = embedded(run.model(), run.text()[static_cast<std::size_t>(position)]), guessed;
    for (int layer = 0; layer < c.layers; ++layer) {
      CAPTURE(step, layer);
      const auto& here = run.layer(layer);
      const auto& read = here.read[static_cast<std::size_t>(step)];
      if (layer < dense) {
        CHECK(read.empty());
      } else {
        std::vector<std::vector<int>> channels;
        for (int h = 0; h < c.kv_heads; ++h) channels.push_back(channels_of(run, rule, layer, h, prompts));
        const auto scores = scores_of(run, rule, layer, guessed, position, channels);
        const std::size_t m = number_of(scores, rule);
        for (int h = 0; h < c.kv_heads; ++h) {
          std::vector<int> wanted = best(scores[static_cast<std::size_t>(h)], positions_to(position), m);
          wanted.push_back(position);
          CHECK(read[static_cast<std::size_t>(h)] == wanted);
        }
        share += static_cast<double>(m) / position / all / (c.layers - dense);
      }
      if (layer + 1 == c.layers) break;
      guessed = queries_ahead(run.model(), layer, x, position);
      Vector attended;
      for (const Vector& head : here.outputs.at[static_cast<std::size_t>(step)])
        attended.insert(attended.end(), head.begin(), head.end());
      finish_layer(run.model(), layer, attended, x);
    }
    CHECK(run.kept(c.layers - 1, 0) == positions_to(position + 1));
    for (int layer = 0; layer < c.layers; ++layer)
      for (int h = 0; h < c.kv_heads; ++h) {
        CAPTURE(step, layer, h);
        CHECK(pages_lie_right(run, rule, layer, h, step, position + 1));
      }
  }
  return share;
}

}  // namespace

TEST_CASE("infinigen: the plain implementation gives the card's number") {
  const std::vector<Vector> scores{{9, 6.2, 5.1, 4.9, 1}, {3, 2.9, 2.5, -1.5, -.5}};
  const std::size_t m = number_of(scores, {});
  CHECK(m == 3);
  for (const Vector& of_head : scores) CHECK(best(of_head, positions_to(5), m) == std::vector<int>{0, 1, 2});
}

TEST_CASE("infinigen reads on real text what a plain implementation reads") {
  const double some = check_reads({}, {});
  CHECK(some > 0);
  CHECK(some < 1);
  CHECK(check_reads({{"alpha", 1.5}, {"partial_ratio", .35}}, {.alpha = 1.5, .ratio = .35}) < some);
  check_reads({{"alpha", 8.}, {"cap", std::int64_t{11}}}, {.alpha = 8, .cap = 11});
  check_reads({{"alpha", 8.}, {"cap", std::int64_t{0}}, {"cap_share", .125}},
              {.alpha = 8, .cap = 0, .cap_share = .125});
}

TEST_CASE("infinigen: without offload all pages stay on the device, and it reads the same") {
  check_reads({}, {.offload = false});
}

TEST_CASE("infinigen: a head has room for some pages beside those that it reads") {
  check_reads({{"alpha", 8.}, {"tokens", std::int64_t{5 * page_size + 3}}}, {.alpha = 8, .room = 5}, 130);
}

TEST_CASE("infinigen: layer 0 guesses for layer 1 where that is not dense, too") {
  check_reads({{"dense_layers", std::int64_t{1}}}, {.dense = 1});
}

TEST_CASE("infinigen: the queries of a second prompt count with those of the first") { check_reads({}, {}, 130); }

TEST_CASE("infinigen with the skew of its model reads on real text what a plain implementation reads") {
  const TempDir folder;
  const Profile skew = recall_profile("infinigen_skew", 300, 1, (folder / "p.h5").string());
  const double some = check_reads({}, {.skew = &skew});
  CHECK(some > 0);
  CHECK(some < 1);
  check_reads({{"alpha", 1.5}, {"partial_ratio", .05}}, {.alpha = 1.5, .ratio = .05, .skew = &skew}, 130);
}

TEST_CASE("infinigen: short prompts, and what it refuses") {
  const auto read = [](std::map<std::string, ParamValue> params, int of_prompt, int layer) {
    params["skew"] = false;
    OnText run(Role::policy, "infinigen", params, 0, 64, 8);
    run.prefill(of_prompt);
    run.step();
    return run.layer(layer).read[0];
  };
  CHECK(read({}, 1, 2)[0].size() == 2);
  // Layer 0 has no layer before it.
  CHECK(read({{"dense_layers", std::int64_t{0}}}, 30, 0).empty());
  CHECK(!read({{"dense_layers", std::int64_t{0}}}, 30, 1).empty());
  CHECK(read({{"dense_layers", std::int64_t{99}}}, 30, 7).empty());
  const auto make = [](std::map<std::string, ParamValue> params, int budget = 0) {
    params["skew"] = false;
    OnText(Role::policy, "infinigen", params, budget, 64, 8);
  };
  CHECK_THROWS_WITH(make({{"alpha", 0.}}), Catch::Contains("alpha"));
  CHECK_THROWS_WITH(make({{"cap_share", 0.}}), Catch::Contains("cap_share"));
  CHECK_THROWS_WITH(make({{"partial_ratio", 1.5}}), Catch::Contains("partial_ratio"));
  CHECK_THROWS_WITH(make({}, 32), Catch::Contains("budget"));
  const auto skewed = [](const std::vector<float>& values) {
    OnText(Role::policy, "infinigen", {}, 0, 64, 8, [&](int, int) {
      Profile p;
      p["skew"].values = values;
      return p;
    });
  };
  CHECK_THROWS_WITH(skewed({1, 0}), Catch::Contains("got a skew of 2 numbers, wanted ") &&
                                        Catch::Contains("that of infinigen_skew for this model"));
  CHECK_THROWS_WITH(skewed({1, NAN}), Catch::Contains("got nan in a skew, wanted finite numbers"));
  CHECK_THROWS_WITH(OnText(Role::policy, "infinigen", {}, 0, 64, 8), Catch::Contains("got no profile for 'infinigen'"));
}
