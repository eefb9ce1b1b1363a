#include "ops/attend/attend.hpp"
#include "ops/attend/left_out.hpp"
#include "plugin/before_step.hpp"
#include "store/workspace.hpp"
#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr int prompt = 160, steps = 24, tokens = 20;

struct Rule {
  std::size_t rank = 16;  // a quarter of head_dim
  int local = 4;          // of 19 tokens beside the step's own
  bool norm_scale = true;
};

using Rows = std::vector<std::vector<double>>;

// Each query head's scores of keys, by the rank largest components of the group's queries.
Rows scores_of_heads(const Rows& queries, const Rows& keys, const Rule& rule) {
  const std::size_t dim = queries[0].size();
  std::vector<double> size(dim);
  for (const auto& q : queries)
    for (std::size_t d = 0; d < dim; ++d) size[d] += std::abs(q[d]);
  const std::vector<int> largest = best(size, positions_to(static_cast<int>(dim)), rule.rank);
  Rows scores;
  for (const auto& q : queries) {
    double all = 0, large = 0;
    for (const double x : q) all += std::abs(x);
    for (const int d : largest) large += std::abs(q[static_cast<std::size_t>(d)]);
    const double scale = rule.norm_scale ? std::sqrt(static_cast<double>(dim) * large / all) : 1;
    auto& own = scores.emplace_back(keys.size());
    for (std::size_t t = 0; t < keys.size(); ++t)
      for (const int d : largest)
        own[t] += q[static_cast<std::size_t>(d)] * keys[t][static_cast<std::size_t>(d)] / scale;
  }
  return scores;
}

// Their sums over the group.
std::vector<double> scores_of(const Rows& queries, const Rows& keys, const Rule& rule) {
  std::vector<double> sums(keys.size());
  for (const auto& own : scores_of_heads(queries, keys, rule))
    for (std::size_t t = 0; t < own.size(); ++t) sums[t] += own[t];
  return sums;
}

struct Filled {
  double share = 0;            // of the estimated attention that the tokens read have
  std::vector<double> output;  // of attention to them, and the mean value for the rest
};

Filled filled(const std::vector<double>& query, const Rows& keys, const Rows& values, std::vector<double> scores,
              const std::vector<int>& read, bool norm_scale = true) {
  const std::size_t dim = values[0].size();
  if (!norm_scale)
    for (double& x : scores) x /= std::sqrt(static_cast<double>(query.size()));
  Filled out;
  const std::vector<double> estimate = softmax(scores);
  std::vector<double> logits;
  for (const int t : read) {
    out.share += estimate[static_cast<std::size_t>(t)];
    logits.push_back(dot(query, keys[static_cast<std::size_t>(t)]) / std::sqrt(static_cast<double>(query.size())));
  }
  const std::vector<double> exact = softmax(logits);
  for (std::size_t d = 0; d < dim; ++d) {
    double mean = 0, y = 0;
    for (const auto& v : values) mean += v[d] / static_cast<double>(values.size());
    for (std::size_t i = 0; i < read.size(); ++i) y += exact[i] * values[static_cast<std::size_t>(read[i])][d];
    out.output.push_back(out.share * y + (1 - out.share) * mean);
  }
  return out;
}

Rows of_head(const SeenRows& rows, int head) {
  Rows out;
  for (const auto& heads : rows.at) out.push_back(heads[static_cast<std::size_t>(head)]);
  return out;
}

void check_reads(const std::map<std::string, ParamValue>& params, const Rule& rule, bool fills = false) {
  OnText run(Role::policy, "sparq", params, tokens, prompt + steps, 8);
  run.prefill(prompt);
  for (int step = 0; step < steps; ++step) {
    run.step();
    const int seen = prompt + step + 1;
    for (int layer = 0; layer < run.config().layers; ++layer)
      for (int head = 0; head < run.config().kv_heads; ++head) {
        CAPTURE(step, layer, head);
        const auto& here = run.layer(layer);
        const auto& of_step = here.queries.at.back();
        const Rows keys = of_head(here.keys, head),
                   queries{of_step.begin() + head * run.group(), of_step.begin() + (head + 1) * run.group()};
        auto scores = scores_of(queries, keys, rule);
        std::fill(scores.end() - rule.local - 1, scores.end(), INFINITY);
        std::vector<int> read = here.read[static_cast<std::size_t>(step)][static_cast<std::size_t>(head)];
        std::sort(read.begin(), read.end());
        CHECK(read == best(scores, positions_to(seen), tokens));
        if (!fills || step % 8 > 0) continue;
        const Rows of_heads = scores_of_heads(queries, keys, rule), values = of_head(here.values, head);
        for (std::size_t g = 0; g < queries.size(); ++g) {
          Filled wanted = filled(queries[g], keys, values, of_heads[g], read, rule.norm_scale);
          const auto& got = here.outputs.at.back()[static_cast<std::size_t>(head * run.group()) + g];
          double most = 0, size = 0;
          for (std::size_t d = 0; d < got.size(); ++d)
            most = std::max(most, std::abs(got[d] - wanted.output[d])), size = std::max(size, std::abs(got[d]));
          CHECK(most < 1e-4 * size);
        }
      }
  }
}

}  // namespace

// Channels 0 and 1 are the largest, and sqrt(4 * 3 / 3.5) divides their products.
TEST_CASE("sparq: the card's scores") {
  const auto scores = scores_of({{2, -1, .5, 0}}, {{1, 0, 0, 0}, {0, -2, 0, 0}, {-1, 0, 4, 0}}, {.rank = 2});
  CHECK(scores[0] == Approx(1.0801).epsilon(1e-4));
  CHECK(scores[1] == Approx(1.0801).epsilon(1e-4));
  CHECK(scores[2] == Approx(-1.0801).epsilon(1e-4));
  CHECK(best(scores, positions_to(3), 2) == std::vector<int>{0, 1});
  const Filled out =
      filled({2, -1, .5, 0}, {{1, 0, 0, 0}, {0, -2, 0, 0}, {-1, 0, 4, 0}}, {{1}, {3}, {11}}, scores, {0, 1});
  CHECK(out.share == Approx(.9455).epsilon(1e-4));
  CHECK(out.output[0] == Approx(2.1635).epsilon(1e-4));
}

// The card's keys and values in another order, since a step reads its own token. Twice the channels, of which half are
// 0, divide logits and scores by sqrt(2) more: the query has so much more.
TEST_CASE("sparq: the card's output by the policy, the choice's list and attention") {
  const bool key_copy = GENERATE(true, false);
  PagedFixture cache({1, 1, 8, 4, 4});
  const auto append = [&](std::vector<float> key, float value) {
    key.resize(8);
    cache.append(0, 0, key, {value, 0, 0, 0, 0, 0, 0, 0});
  };
  append({-1, 0, 4, 0}, 11);
  append({1, 0, 0, 0}, 1);
  std::vector<float> query{2, -1, .5f, 0, 0, 0, 0, 0};
  for (float& x : query) x *= std::sqrt(2.f);

  static Registry registry;
  const PluginInfo& info = registry.require(Role::policy, "sparq");
  const auto policy =
      create<Policy>(info, resolve(info, {{"rank", std::int64_t{2}}, {"local", 0.}, {"key_copy", key_copy}}));
  Shape shape;
  shape.layers = shape.max_slots = shape.query_heads = shape.kv_heads = 1;
  shape.head_dim = 8, shape.page_size = 4, shape.max_tokens = 16;
  Ledger ledger;
  StoreWorkspace workspace(ledger, Stream::cpu());
  policy->attach(shape, {BudgetAmount::tokens, 2}, workspace);
  std::int32_t slot = 0, position = 2, step = 0, budget = 2;
  const bool last = true;
  PagedKv pages;
  const auto begin = [&](LayerKv& kv) {
    pages = cache.view();
    kv.shape = &shape, kv.pages = pages, kv.workspace = &workspace;
    kv.keys = {&pages, KvSide::key}, kv.values = {&pages, KvSide::value};
    kv.slots = &slot, kv.position = &position, kv.step = &step, kv.budget = &budget;
    kv.max_length = position;
  };
  LayerPrefill prompt_kv;
  begin(prompt_kv);
  const std::vector<float> queries(16);
  prompt_kv.chunk_queries = View<const float, 4>::dense(queries.data(), {1, 1, 2, 8});
  prompt_kv.last = &last;
  Edits none;
  policy->prefill(prompt_kv, none, Stream::cpu());
  append({0, -2, 0, 0}, 3);
  position = 3;
  tell_before_step(policy.get(), {.rows = 1, .slots = &slot, .position = &position, .step = &step, .budget = &budget});
  LayerStep now;
  begin(now);
  now.queries = View<const float, 3>::dense(query.data(), {1, 1, 8});
  Edits edits;
  policy->select(now, edits, Stream::cpu());
  REQUIRE(edits.all().size() == 1);
  REQUIRE(edits.all()[0].verb == Edit::attend_tokens);
  REQUIRE(edits.left_out().size() == 1);
  const TokenList read{edits.all()[0].list};
  REQUIRE(read.count(0, 0) == 2);
  CHECK(std::pair{read.index(0, 0, 0), read.index(0, 0, 1)} == std::pair{1, 2});
  CHECK(edits.left_out()[0].share(0, 0) == Approx(.9455).epsilon(1e-4));

  std::vector<float> out(8);
  ops::AttendArgs a;
  a.kv = pages, a.queries = View<const float, 3>::dense(query.data(), {1, 1, 8}), a.tokens = &read;
  a.out = View<float, 3>::dense(out.data(), {1, 1, 8});
  ops::attend(a, workspace, Stream::cpu());
  ops::blend_left_out(pages, edits.left_out()[0], a.out, nullptr, Stream::cpu());
  CHECK(out[0] == Approx(2.1635).epsilon(1e-4));
}

TEST_CASE("sparq reads on real text what a plain implementation reads") {
  check_reads({}, {});
  check_reads({{"rank", std::int64_t{5}}, {"local", 0.}}, {.rank = 5, .local = 0});
  check_reads({{"rank", std::int64_t{3}}, {"norm_scale", false}}, {.rank = 3, .norm_scale = false});
  check_reads({{"key_copy", false}}, {});
  check_reads({{"key_copy", false}, {"rank", std::int64_t{5}}, {"local", 0.}}, {.rank = 5, .local = 0});
}

TEST_CASE("sparq fills what it leaves out with the mean value, as a plain implementation does") {
  const std::pair<const std::string, ParamValue> groups{"mean_value_of_groups", true};
  check_reads({groups}, {}, true);
  check_reads({groups, {"key_copy", false}}, {}, true);
  check_reads({groups, {"rank", std::int64_t{5}}, {"local", 0.}}, {.rank = 5, .local = 0}, true);
  check_reads({groups, {"rank", std::int64_t{3}}, {"norm_scale", false}}, {.rank = 3, .norm_scale = false}, true);
}

TEST_CASE("sparq reads all of a short text as the full cache does, and fills nothing where query heads share") {
  const auto outputs = [](const std::string& policy, const std::map<std::string, ParamValue>& params, int budget) {
    OnText run(Role::policy, policy, params, budget, 64, 8);
    run.prefill(20);
    run.step();
    return run.layer(2).outputs.at.back();
  };
  const auto full = outputs("full", {}, 0);
  CHECK(outputs("sparq", {{"mean_value_of_groups", true}}, 21) == full);
  const auto read = outputs("sparq", {{"mean_value", false}}, tokens - 10);
  CHECK(outputs("sparq", {}, tokens - 10) == read);
  CHECK(outputs("sparq", {{"mean_value_of_groups", true}}, tokens - 10) != read);
  CHECK(outputs("sparq", {{"mean_value_of_groups", true}, {"mean_value", false}}, tokens - 10) == read);
}

TEST_CASE("sparq: dense layers, short prompts, and what it cannot obey") {
  const auto first_read = [](std::map<std::string, ParamValue> params, int of_prompt) {
    OnText run(Role::policy, "sparq", params, tokens, 64, 8);
    run.prefill(of_prompt);
    run.step();
    return std::pair{run.layer(0).read[0], run.layer(1).read[0]};
  };
  const auto dense = first_read({{"dense_layers", std::int64_t{1}}}, 40);
  CHECK(dense.first.empty());
  CHECK(dense.second[0].size() == tokens);
  CHECK(first_read({}, 3).first[0].size() == 4);
  CHECK(first_read({}, 19).first[0].size() == tokens);
  CHECK_THROWS_WITH(OnText(Role::policy, "sparq", {{"rank", std::int64_t{65}}}, tokens, 64, 8),
                    Catch::Contains("got rank 65, wanted at most head_dim, 64"));
}
