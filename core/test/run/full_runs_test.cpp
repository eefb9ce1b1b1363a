// The full cache's runs that come before those of a policy that looks into the future.
#include "run/full_runs.hpp"

#include <catch2/catch.hpp>
#include <cmath>
#include <numeric>

#include "run/answer.hpp"
#include "support/cell_fixture.hpp"
#include "support/labels.hpp"
#include "support/on_text.hpp"

using namespace kvlab;
using Catch::Contains;

namespace {

constexpr int kept_tokens = 24, page = 8;

// A sample of one question, one of two questions about a context, and one whose second question follows the first.
struct Cells : test::CellFixture {
  explicit Cells(const std::string& policy, std::set<Metric> metrics = {Metric::memory})
      : CellFixture(test::tiny_model("llama-gqa3"), test::policy_of(policy, page), std::move(metrics)) {
    add(text(90, 1), text(3, 2), 7);
    for (const unsigned q : {0u, 1u}) {
      add(text(110, 3), text(2 + static_cast<int>(q), 4 + q), 5 + static_cast<int>(q));
      items.items.back().sample = 1;
      items.items.back().question = static_cast<int>(q);
      items.items.back().shared = true;
    }
    add(text(101, 6), text(1, 7), 6);
    add({}, text(4, 8), 5, true);
    experiment.batch = 2;
  }
  std::vector<int> text(int tokens, unsigned seed) const { return test::test_text(tokens, model->config.vocab, seed); }
};

std::string with(const std::string& name, const std::string& params) {
  return "{" + name + ": {" + params + "budget: {tokens: " + std::to_string(kept_tokens) + "}}}";
}

// Sums the attention of decode steps by plain softmax of the queries and keys that pass: [layer][KV head][token].
class Plain final : public EngineObserver {
 public:
  explicit Plain(const ModelConfig& c) : c_(c), keys_(static_cast<std::size_t>(c.layers)) {
    sums.resize(keys_.size(), std::vector<std::vector<double>>(static_cast<std::size_t>(c.kv_heads)));
  }
  void prompt(const PromptLayer& l, const Store&) override { keys_[static_cast<std::size_t>(l.layer)].append(l.keys); }
  void attended(const DecodeLayer& l, const Store&) override {
    const auto layer = static_cast<std::size_t>(l.layer);
    keys_[layer].append(l.keys);
    test::SeenRows queries;
    queries.append(l.queries);
    for (int head = 0; head < c_.kv_heads; ++head)
      for (int g = 0; g < c_.group(); ++g) {
        std::vector<double> logits;
        for (const auto& token : keys_[layer].at)
          logits.push_back(test::dot(queries.at[0][static_cast<std::size_t>(head * c_.group() + g)],
                                     token[static_cast<std::size_t>(head)]) /
                           std::sqrt(c_.head_dim));
        const std::vector<double> mass = test::softmax(logits);
        std::vector<double>& sum = sums[layer][static_cast<std::size_t>(head)];
        sum.resize(mass.size());
        for (std::size_t t = 0; t < mass.size(); ++t) sum[t] += mass[t] / c_.group();
      }
  }
  std::vector<std::vector<std::vector<double>>> sums;

 private:
  const ModelConfig& c_;
  std::vector<test::SeenRows> keys_;
};

// Lets the full cache answer the conversation that begins with the item.
Plain answered(const Cells& f, std::size_t item) {
  EngineOptions o;
  o.max_tokens = 192;
  Engine engine(f.model, test::subjects().policy(test::full_spec()), o);
  Plain plain(f.model->config);
  engine.observe(&plain);
  Sequence sequence(engine);
  REQUIRE(sequence.begin(f.items.items[item]) == Fit::ok);
  for (;; ++item) {
    Answer answer(f.items.items[item]);
    for (int fed = -1; !answer.ended(); fed = answer.tokens().back()) {
      if (fed >= 0) REQUIRE(sequence.feed(fed) == Fit::ok);
      answer.take(sequence.logits(), *f.model->tokenizer);
    }
    if (item + 1 == f.items.items.size() || !f.items.items[item + 1].follows) return plain;
    if (answer.stop() != Answer::Stop::eos) REQUIRE(sequence.feed(answer.tokens().back()) == Fit::ok);
    for (const int token : f.items.items[item + 1].fed) REQUIRE(sequence.feed(token) == Fit::ok);
  }
}

}  // namespace

TEST_CASE("oracle_evict keeps of each sample what the full cache's answers attend to") {
  Cells f(with("oracle_evict", "every: 0, "), {Metric::trace});
  const results::CellResult result = f.run();
  CAPTURE(result.summary.error);
  REQUIRE(result.summary.status == "ok");
  CHECK(test::lasting_labels(result.summary) == "oracle");
  const auto heads = static_cast<std::size_t>(result.trace.kv_heads);
  // Both questions of sample 1 go on in one cache, so it keeps what both attend to.
  std::map<std::size_t, std::vector<std::size_t>> conversations{{0, {0}}, {1, {1, 2}}, {2, {1, 2}}, {3, {3}}};
  int compared = 0;
  for (const auto& [item, of] : conversations) {
    Plain plain = answered(f, of[0]);
    const std::size_t prompt = f.items.items[item].prompt.size();
    for (std::size_t layer = 0; layer < plain.sums.size(); ++layer)
      for (std::size_t head = 0; head < heads; ++head) {
        std::vector<double> mass = plain.sums[layer][head];
        for (std::size_t i = 1; i < of.size(); ++i) {
          static std::map<std::size_t, Plain> others;
          const Plain& other = others.try_emplace(of[i], answered(f, of[i])).first->second;
          for (std::size_t t = 0; t < prompt; ++t) mass[t] += other.sums[layer][head][t];
        }
        mass.resize(prompt);
        std::vector<double> sorted = mass;
        std::sort(sorted.rbegin(), sorted.rend());
        if (sorted[kept_tokens - 1] - sorted[kept_tokens] < 1e-6) continue;  // rounding decides
        const std::size_t at = (item * plain.sums.size() + layer) * heads + head;
        const auto& kept = result.trace.kept;
        const std::vector<int> own(kept.begin() + result.trace.kept_offsets[2 * at],
                                   kept.begin() + result.trace.kept_offsets[2 * at + 1]);
        CAPTURE(item, layer, head);
        CHECK(own == test::best(mass, test::positions_to(static_cast<int>(prompt)), kept_tokens));
        ++compared;
      }
  }
  CHECK(compared > 4 * static_cast<int>(heads));
}

TEST_CASE("no evictor keeps more of the first layer's attention than oracle_evict") {
  // The first layer's queries and keys do not depend on the cache, so the recorded mass is that of any policy's run.
  std::map<std::string, double> mass;
  for (const char* name : {"oracle_evict", "random", "snapkv", "streaming_llm", "knorm", "window"}) {
    Cells f(with(name, name == std::string("oracle_evict") || name == std::string("random") ? "every: 0, "
                       : name == std::string("snapkv")                                      ? "window: 8, "
                                                                                            : ""),
            {Metric::fidelity});
    f.items.items.resize(1);
    f.items.items[0].fed.clear();
    if (name == std::string("streaming_llm") || name == std::string("window"))
      f.experiment.policies[0].schedule.every = 0;
    const results::CellResult result = f.run();
    CAPTURE(name, result.summary.error);
    REQUIRE(result.summary.status == "ok");
    // The prompt asks: its first token comes from no step, and each later one from a step that is compared.
    const auto layers = static_cast<std::size_t>(result.fidelity.layers);
    REQUIRE(result.fidelity.mass.size() > 2 * layers);
    for (std::size_t i = 0; i < result.fidelity.mass.size(); ++i)
      CHECK(std::isfinite(result.fidelity.mass[i]) == (i >= layers));
    for (std::size_t i = layers; i < result.fidelity.mass.size(); i += layers) mass[name] += result.fidelity.mass[i];
  }
  REQUIRE(mass.size() == 6);
  for (const auto& [name, sum] : mass) {
    CAPTURE(name, sum, mass["oracle_evict"]);
    if (name != "oracle_evict") CHECK(sum < mass["oracle_evict"]);
  }
}

TEST_CASE("a run of the full cache keeps the mass of each step and of those after it") {
  Cells f(with("oracle_evict", ""));
  const CellInput in = f.input();
  FullRuns runs;
  runs.prepare(in, {0, 1, 2});
  CHECK(runs.runs() == 3);
  const auto& items = f.items.items;
  const auto sum = [](std::span<const float> x) { return std::accumulate(x.begin(), x.end(), 0.); };
  for (const std::uint32_t q : {0u, 1u, 2u, 3u}) {
    // All answers have their full length: the tiny model ends none of them.
    const int steps = static_cast<int>(items[q].fed.size()) + items[q].max_new - 1 +
                      (q == 3 ? 1 + static_cast<int>(items[4].fed.size()) + items[4].max_new - 1 : 0);
    for (int step = 0; step < steps; ++step) {
      CAPTURE(q, step, steps);
      const auto now = runs.from(q, false, step, 1, 0), later = runs.from(q, false, step + 1, 1, 0);
      REQUIRE(now.size() == items[q].prompt.size() + static_cast<std::size_t>(step) + 1);
      // The step itself gives 1 in all.
      CHECK(sum(now) - sum(later.first(std::min(later.size(), now.size()))) == Approx(1).epsilon(1e-4));
    }
    CHECK(runs.from(q, false, steps, 1, 0).empty());
  }
  CHECK(runs.from(3, false, 5, 0, 0).data() == runs.from(4, false, 5, 0, 0).data());  // a turn of its conversation
  const auto both = runs.from(1, true, 0, 1, 1), one = runs.from(1, false, 0, 1, 1),
             other = runs.from(2, false, 0, 1, 1);
  REQUIRE(both.size() == items[1].prompt.size());
  for (std::size_t t = 0; t < both.size(); ++t) CHECK(both[t] == Approx(one[t] + other[t]));
  CHECK(runs.from(0, true, 0, 1, 0).data() == runs.from(0, false, 0, 1, 0).data());
  CHECK_THROWS_WITH(runs.from(9, false, 0, 0, 0), Contains("got no run of the full cache for question 9"));

  runs.prepare(in, {1}, 100);
  CHECK(runs.runs() == 3);
  runs.prepare(in, {0}, 2);  // shorter answers are another run
  CHECK(runs.runs() == 4);
  CHECK(runs.from(0, false, static_cast<int>(items[0].fed.size()), 0, 0).size() == items[0].prompt.size() + 4);
  CHECK(runs.from(0, false, static_cast<int>(items[0].fed.size()) + 1, 0, 0).empty());
}

TEST_CASE("a turn follows all tokens of a forced answer, its end token too, as in the policy's own run") {
  Cells f(with("oracle_evict", ""));
  auto& items = f.items.items;
  REQUIRE_FALSE(f.model->tokenizer->eos_ids().empty());
  items[3].forced = {5, f.model->tokenizer->eos_ids().front()};
  const CellInput in = f.input();
  FullRuns runs;
  runs.prepare(in, {2});
  // The forced answer of two tokens feeds one, then the other with the turn.
  const int steps =
      static_cast<int>(items[3].fed.size()) + 1 + 1 + static_cast<int>(items[4].fed.size()) + items[4].max_new - 1;
  CHECK_FALSE(runs.from(3, false, steps - 1, 0, 0).empty());
  CHECK(runs.from(3, false, steps, 0, 0).empty());
}

TEST_CASE("a policy that looks into the future has no workload") {
  Cells f(with("oracle_evict", ""));
  f.experiment.workloads.emplace_back();
  CHECK_THROWS_WITH(check_cell(f.input()), Contains("got a workload for 'oracle_evict', wanted none"));
  Cells other(with("random", ""));
  std::erase_if(other.items.items, [](const Item& item) { return item.follows; });  // a workload has no turns
  other.experiment.workloads.emplace_back();
  CHECK_NOTHROW(check_cell(other.input()));
}
