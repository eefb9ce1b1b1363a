#include "run/equal_bytes.hpp"

#include <catch2/catch.hpp>
#include <cmath>
#include <functional>
#include <set>

#include "plugin/budget_tokens.hpp"
#include "support/cell_fixture.hpp"
#include "support/labels.hpp"

using namespace kvlab;

namespace {

constexpr int page = 16;

struct Cells : test::CellFixture {
  explicit Cells(const std::string& policy, std::set<Metric> metrics = {Metric::score, Metric::memory})
      : CellFixture(test::tiny_model("llama-gqa3"), test::policy_of(policy, page), std::move(metrics)) {
    for (unsigned i = 0; i < 6; ++i)
      add(test::test_text(160 + 5 * static_cast<int>(i), model->config.vocab, i + 1), {}, 12);
  }
  // As experiment.cpp does.
  void equal(double bytes) {
    experiment.equal_bytes = static_cast<std::int64_t>(bytes);
    PolicySpec& policy = experiment.policies[0];
    if (takes_budget(policy, test::built_catalog())) policy.budget = {BudgetAmount::bytes, std::floor(bytes)};
  }
  void tokens(int n) { experiment.policies[0].budget = {BudgetAmount::tokens, static_cast<double>(n)}; }
};

double bytes_with(const std::string& policy, int tokens) {
  Cells cells(policy);
  cells.tokens(tokens);
  const results::CellResult result = cells.run();
  REQUIRE(result.summary.status == "ok");
  return result.summary.device_bytes_decode;
}

}  // namespace

TEST_CASE("a budget by bytes is the nearest one, and of equal bytes the largest") {
  const auto pages = [](int tokens) { return 1000. + 640 * ((tokens + page - 1) / page); };
  const auto smooth = [](int tokens) { return 5000. + 37 * tokens; };
  const auto full_at_300 = [](int tokens) { return 800. + 40 * std::min(tokens, 300); };
  const auto mixed = [&](int tokens) { return (pages(tokens) + smooth(tokens)) / 2; };
  for (const auto& held : std::vector<std::function<double(int)>>{pages, smooth, full_at_300, mixed})
    for (const int most : {90, 1000, 30'000})
      for (const double share : {0., .01, .1, .333, .5, .9, 1., 2.}) {
        const double wanted = held(4) + share * (held(most) - held(4));
        std::set<int> tried;
        const HeldBytes found = nearest_budget(wanted, 4, most, page, [&](int tokens) {
          CHECK(tried.insert(tokens).second);
          CHECK(tokens >= 4);
          CHECK(tokens <= most);
          return held(tokens);
        });
        CAPTURE(most, share, wanted, found.tokens, found.bytes);
        double best = INFINITY;
        for (int t = 4; t <= most; ++t) best = std::min(best, std::fabs(held(t) - wanted));
        CHECK(std::fabs(found.bytes - wanted) <= std::max(best, bytes_equal * wanted) + 1e-9);
        CHECK(found.bytes == held(found.tokens));
        CHECK(tried.size() <= most_trials);
      }
  // Budgets below 40 are refused when they run, and those above 500 do not fit.
  const auto within = [&](int tokens) { return tokens < 40 ? -INFINITY : tokens > 500 ? INFINITY : smooth(tokens); };
  for (const int wanted : {40, 41, 100, 480, 500}) {
    const HeldBytes found = nearest_budget(smooth(wanted), 1, 30'000, page, within);
    CAPTURE(wanted, found.tokens);
    CHECK(std::fabs(found.bytes - smooth(wanted)) <= bytes_apart * smooth(wanted));
  }
  CHECK(nearest_budget(pages(64) + 5, 1, 1000, page, pages).tokens == 64);
  CHECK(nearest_budget(pages(64) - 5, 1, 1000, page, pages).tokens == 64);
}

TEST_CASE("equal_bytes finds the budget whose bytes it was given") {
  for (const std::string policy : {"random", "{random: {every: 1}}", "snapkv: {window: 8}", "streaming_llm"}) {
    CAPTURE(policy);
    const double wanted = bytes_with(policy, 64);
    REQUIRE(wanted < 0.9 * bytes_with(policy, 96));  // else any budget would do
    Cells cells(policy);
    cells.equal(wanted);
    const results::CellResult result = cells.run();
    CAPTURE(result.summary.error, result.summary.warnings);
    REQUIRE(result.summary.status == "ok");
    CHECK(result.summary.budget_bytes == static_cast<std::int64_t>(wanted));
    CHECK(result.summary.budget_tokens > 48);
    CHECK(result.summary.budget_tokens <= 64);
    CHECK(result.summary.device_bytes_decode == Approx(wanted).epsilon(bytes_apart));
    CHECK(result.summary.warnings.empty());
  }
}

TEST_CASE("equal_bytes is of a sequence, whatever the batch") {
  const double wanted = bytes_with("streaming_llm", 64);
  for (const int batch : {1, 3}) {
    Cells cells("streaming_llm");
    cells.experiment.batch = batch;
    cells.equal(wanted);
    const results::CellResult result = cells.run();
    CHECK(result.summary.budget_tokens == 64);
    CHECK(result.summary.warnings.empty());
  }
}

TEST_CASE("a warning says where equal_bytes is not met") {
  const auto warnings = [](const std::string& policy, double bytes) {
    Cells cells(policy);
    cells.equal(bytes);
    const results::CellResult result = cells.run();
    CAPTURE(result.summary.error);
    REQUIRE(result.summary.status == "ok");
    return result.summary.warnings;
  };
  using Catch::Matchers::Contains;
  // No number of pages comes within 2 % of a place between two.
  const double between = (bytes_with("streaming_llm", 64) + bytes_with("streaming_llm", 80)) / 2;
  CHECK_THAT(warnings("streaming_llm", between), Contains("'streaming_llm' holds") && Contains("in trials"));
  CHECK_THAT(warnings("full", between), Contains("leaves 'full' as it is"));
  CHECK_THAT(warnings("{quest: {dense_layers: 0}}", between), Contains("'quest' evicts nothing"));
  CHECK_THAT(warnings("random", 1e9), Contains("'random' holds"));  // all that there is
}

TEST_CASE("equal_bytes below what a policy always keeps fail its cell, and not the run") {
  using Catch::Matchers::Contains;
  for (const char* policy : {"{streaming_llm: {sinks: 40}}", "{arkvale: {sinks: 40, window: 40}}"}) {
    CAPTURE(policy);
    Cells cells(policy);
    cells.equal(bytes_with("random", 1));
    CHECK_NOTHROW(check_cell(cells.input()));
    const results::CellResult result = cells.run();
    CHECK(result.summary.status == "failed");
    CHECK_THAT(result.summary.error, Contains("got equal_bytes of") && Contains("holds that with a budget of"));
  }
  // A page of each head fits, and then the tables of the cache are too much.
  Cells cells("random");
  const ModelConfig& c = cells.model->config;
  Shape shape;
  shape.head_dim = c.head_dim, shape.page_size = page, shape.dtype = cells.model->dtype;
  cells.equal(static_cast<double>(c.layers * c.kv_heads * page_bytes(shape, {}, {})));
  const results::CellResult result = cells.run();
  CHECK(result.summary.status == "failed");
  CHECK_THAT(result.summary.error, Contains("got equal_bytes of") && Contains("'random' holds that with a budget of"));
}

TEST_CASE("equal_bytes of a policy that evicts at the prompt's end alone: the error says why, and what helps") {
  using Catch::Matchers::Contains;
  const auto answered_long = [](Cells& cells) {
    for (Item& item : cells.items.items) item.max_new = 80;
    return cells.run().summary;
  };
  Cells least("{random: {every: 1}}", {Metric::memory});
  least.tokens(1);
  const double bytes = answered_long(least).device_bytes_decode;
  const auto error = [&](const std::string& policy) {
    Cells cells(policy, {Metric::memory});
    cells.equal(bytes);
    return answered_long(cells).error;
  };
  const std::string stays =
      "the smallest that it takes. It evicts at the prompt's end alone, so tokens of later steps stay";
  const std::string helps = ": with schedule: {every: 1} it evicts in decode steps, too";
  CHECK_THAT(error("random"), Contains(stays + helps));
  CHECK_THAT(error("{knorm: {schedule: {every: 0}}}"), Contains(stays + helps));
  CHECK_THAT(error("{snapkv: {window: 8}}"), Contains(stays) && !Contains("every: 1"));  // it sees the prompt's queries
  CHECK(error("{random: {schedule: {every: 1}}}").empty());
  CHECK_THAT(error("{streaming_llm: {sinks: 40}}"), Contains("the smallest that it takes") && !Contains("stay"));
}

TEST_CASE("equal_bytes that no budget can meet are refused before the run") {
  using Catch::Matchers::Contains;
  const auto refused = [](const std::string& policy, double bytes) -> std::string {
    Cells cells(policy);
    cells.equal(bytes);
    try {
      check_cell(cells.input());
    } catch (const Error& e) {
      CHECK(e.code() == Errc::config);
      return e.what();
    }
    return "";
  };
  const Cells cells("random");
  const ModelConfig& c = cells.model->config;
  Shape shape;
  shape.head_dim = c.head_dim, shape.page_size = page, shape.dtype = cells.model->dtype;
  const auto heads = static_cast<double>(c.layers * c.kv_heads);
  const double least = heads * static_cast<double>(page_bytes(shape, {}, {}));
  for (const char* policy : {"random", "{snapkv: {window: 8}}", "streaming_llm"}) {
    CAPTURE(policy);
    CHECK(refused(policy, least).empty());
    CHECK_THAT(refused(policy, least * (1 - 2 * bytes_apart)),
               Contains("got equal_bytes of") && Contains("wanted at least " + std::to_string(std::int64_t(least))) &&
                   Contains("it holds a page for each KV head"));
  }
  CHECK(refused("full", 1).empty());
  CHECK(refused("{snapkv: {window: 8, codec: int4}}", 0.9 * least).empty());  // its pages are smaller

  // A selector reads so many bytes of pages, and all tokens of dense layers.
  CHECK(refused("{quest: {dense_layers: 0, min_pages: 1}}", 2 * least).empty());
  const std::string few = refused("{quest: {dense_layers: 0}}", 2 * least);
  CHECK_THAT(few, Contains("whole pages of which hold 16 tokens per KV head, wanted at least the 48 that are always "
                           "read, 3 pages of 16: at least "));
  const double enough = std::stod(few.substr(few.rfind("at least ") + 9));
  CHECK(refused("{quest: {dense_layers: 0}}", enough).empty());
  CHECK_THAT(refused("{quest: {dense_layers: 0}}", enough - 1), Contains("hold 32 tokens per KV head"));
  CHECK_THAT(refused("{quest: {dense_layers: 0}}", least / 2),
             Contains("whole pages of which hold 0 tokens per KV head"));
  CHECK_THAT(refused("{quest: {dense_layers: 1}}", least), Contains("3 pages of 16: the first dense layer takes "));
  // On the host its pages leave the device, and a budget is sought.
  const std::string offloaded = "{quest: {dense_layers: 1, placement: {tier: host}}}";
  CHECK_THAT(refused(offloaded, least), Contains("it holds all tokens of 1 dense layer, "));
  CHECK(refused(offloaded, 40 * least).empty());
}

TEST_CASE("an oracle is labelled and has no times") {
  for (const char* policy : {"quest", "oracle", "oracle_evict"}) {
    const bool oracle = policy != std::string("quest");
    CAPTURE(policy);
    Cells cells(policy, {Metric::score, Metric::memory, Metric::latency});
    cells.tokens(64);
    const results::CellResult result = cells.run();
    CAPTURE(result.summary.error);
    REQUIRE(result.summary.status == "ok");
    CHECK(test::lasting_labels(result.summary) == (oracle ? "oracle" : ""));
    const auto timed = [&](double ms) { return std::isfinite(ms) != oracle; };
    CHECK(timed(result.summary.ttft_ms));
    CHECK(timed(result.summary.tpot_ms_p50));
    CHECK(timed(result.summary.tokens_per_s));
    CHECK(result.step_ms.empty() == oracle);
    CHECK(result.token_ms.empty() == oracle);
    CHECK(std::isfinite(result.summary.device_bytes_decode));
  }
}
