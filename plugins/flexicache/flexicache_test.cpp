#include "support/on_text.hpp"
#include "support/one_head.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr int page = 8, prompt = 200, steps = 20, most_tokens = 64, period = 4;

bool unstable(int layer, int head) { return (layer + head) % 3 == 0; }

std::vector<int> best_pages(const OnText& run, int layer, int head, int position, std::size_t count) {
  const auto& seen = run.layer(layer);
  const auto bounds = page_bounds(seen.queries, seen.keys, static_cast<std::size_t>(position), head, run.group(), page);
  std::vector<double> score = bounds[0];
  for (const auto& of_query : bounds)
    for (std::size_t i = 0; i < score.size(); ++i) score[i] = std::max(score[i], of_query[i]);
  return best(score, positions_to(static_cast<int>(score.size())), std::min(count, score.size()));
}

// Pages of the newest `tokens` of position + 1 tokens, and the newest page.
std::set<int> with_new(std::vector<int> pages, int position, int tokens) {
  std::set<int> all(pages.begin(), pages.end());
  for (int p = std::max(0, position + 1 - tokens) / page; p <= position / page; ++p) all.insert(p);
  return all;
}

}  // namespace

TEST_CASE("flexicache reads on real text what a plain implementation reads, and holds no more") {
  // by_step: the first step's query makes the first choice, and the step waits for its pages.
  const auto [overlap, by_step] = GENERATE(std::pair{true, false}, std::pair{false, false}, std::pair{true, true});
  CAPTURE(overlap, by_step);
  OnText run(Role::policy, "flexicache",
             {{"rerank_every", std::int64_t{period}},
              {"overlap", overlap},
              {"first_query", std::string(by_step ? "step" : "prompt")}},
             most_tokens, prompt + steps, page, unstable);
  run.prefill(prompt);
  const auto k = static_cast<std::size_t>((most_tokens - period) / page);
  std::map<std::pair<int, int>, std::vector<int>> chosen;
  for (int layer = 0; layer < run.config().layers; ++layer)
    for (int head = 0; head < run.config().kv_heads; ++head)
      chosen[{layer, head}] = best_pages(run, layer, head, prompt - 1, k);
  for (int step = 0; step < steps; ++step) {
    run.step();
    const int position = prompt + step;
    for (int layer = 0; layer < run.config().layers; ++layer)
      for (int head = 0; head < run.config().kv_heads; ++head) {
        CAPTURE(step, layer, head);
        const bool due = step % period == 0;
        auto& pages = chosen[{layer, head}];
        const auto choose = [&] { pages = best_pages(run, layer, head, position, k); };
        if (unstable(layer, head) || (due && !overlap) || (step == 0 && by_step)) choose();
        std::set<int> wanted = with_new(pages, position, period);
        const auto& read = run.layer(layer).read[static_cast<std::size_t>(step)][static_cast<std::size_t>(head)];
        CHECK(std::set<int>(read.begin(), read.end()) == wanted);
        if (due && overlap && !unstable(layer, head)) {  // the next step reads them
          choose();
          wanted = with_new(pages, position, period);
        }
        const auto device = run.pages_on(Tier::device, layer, head), host = run.pages_on(Tier::host, layer, head);
        if (unstable(layer, head)) {
          CHECK(static_cast<int>(device.size()) == position / page + 1);
          CHECK(host.empty());
          continue;
        }
        if (due) CHECK(std::set<int>(device.begin(), device.end()) == wanted);
        CHECK(device.size() <= wanted.size() + 1);
        CHECK(static_cast<int>(host.size()) >= (position + 1 - period) / page);
      }
  }
}

TEST_CASE("flexicache: without reranking the first choice stays, whichever query made it") {
  for (const bool overlap : {true, false}) {
    CAPTURE(overlap);
    OnText run(Role::policy, "flexicache",
               {{"rerank_every", std::int64_t{period}},
                {"overlap", overlap},
                {"reranking", false},
                {"first_query", std::string("step")}},
               most_tokens, prompt + steps, page, unstable);
    run.prefill(prompt);
    const auto all = static_cast<std::size_t>(prompt / page);
    for (int head = 0; head < run.config().kv_heads; ++head) CHECK(run.pages_on(Tier::device, 1, head).size() == all);
    for (int step = 0; step < 6; ++step) run.step();
    for (int layer = 0; layer < run.config().layers; ++layer)
      for (int head = 0; head < run.config().kv_heads; ++head) {
        if (unstable(layer, head)) continue;
        CAPTURE(layer, head);
        const auto chosen =
            best_pages(run, layer, head, prompt, static_cast<std::size_t>((most_tokens - period) / page));
        const auto& read = run.layer(layer).read[5][static_cast<std::size_t>(head)];
        CHECK(std::set<int>(read.begin(), read.end()) == with_new(chosen, prompt + 5, period));
      }
  }
}

TEST_CASE("flexicache: a later turn's prompt makes a choice, whichever query made the first one") {
  constexpr int more = 40, first_steps = 6;
  for (const auto& [overlap, query] : {std::pair{true, "step"}, {false, "step"}, {true, "prompt"}}) {
    CAPTURE(overlap, query);
    OnText run(Role::policy, "flexicache",
               {{"rerank_every", std::int64_t{period}},
                {"overlap", overlap},
                {"reranking", false},
                {"first_query", std::string(query)}},
               most_tokens, prompt + first_steps + more + 4, page, unstable);
    run.prefill(prompt);
    for (int step = 0; step < first_steps; ++step) run.step();
    run.prefill(more);
    run.step();
    const int last = prompt + first_steps + more - 1;
    for (int layer = 0; layer < run.config().layers; ++layer)
      for (int head = 0; head < run.config().kv_heads; ++head) {
        if (unstable(layer, head)) continue;
        CAPTURE(layer, head);
        const auto chosen = best_pages(run, layer, head, last, static_cast<std::size_t>((most_tokens - period) / page));
        const auto& read = run.layer(layer).read[first_steps][static_cast<std::size_t>(head)];
        CHECK(std::set<int>(read.begin(), read.end()) == with_new(chosen, last + 1, period));
      }
  }
}

TEST_CASE("flexicache refuses a budget below the newest tokens and a page") {
  const auto with = [](bool keep_new, int tokens) {
    OnText(Role::policy, "flexicache", {{"rerank_every", std::int64_t{period}}, {"keep_new", keep_new}}, tokens, 64,
           page, unstable);
  };
  CHECK_THROWS_WITH(with(true, period + page - 1),
                    Catch::Contains("got a budget of 11 tokens, wanted at least 12: the newest ones and a page"));
  CHECK_NOTHROW(with(true, period + page));
  CHECK_THROWS_WITH(with(false, page - 1), Catch::Contains("got a budget of 7 tokens, wanted at least 8"));
  CHECK_NOTHROW(with(false, page));
}

// The method card's memory of a request, in the tags of the ledger. D dimensions, b bytes, n tokens, pages of p.
TEST_CASE("flexicache takes the bytes of the method's formula") {
  OnText run(Role::policy, "flexicache", {{"keep_new", false}}, most_tokens, prompt + steps, page, unstable);
  const std::int64_t d = run.config().head_dim, b = 4, k = most_tokens / page;
  std::int64_t free = 0, bound = 0;  // unstable and stable heads
  for (int layer = 0; layer < run.config().layers; ++layer)
    for (int head = 0; head < run.config().kv_heads; ++head) (unstable(layer, head) ? free : bound) += 1;
  const auto check = [&](std::int64_t n) {
    CAPTURE(n);
    const std::int64_t pages = (n + page - 1) / page;
    const auto of = [&](Tier tier, Tag tag) { return run.ledger().held(tier)[static_cast<std::size_t>(tag)]; };
    const auto kv = [&](Tier tier) { return of(tier, Tag::keys) + of(tier, Tag::values); };
    CHECK(kv(Tier::device) >= 2 * d * b * page * (free * pages + bound * k));
    CHECK(kv(Tier::device) <= 2 * d * b * page * (free * pages + bound * (k + 1)));
    CHECK(kv(Tier::host) == 2 * d * b * page * bound * (n / page));
    CHECK(of(Tier::device, Tag::summaries) == 2 * d * b * (free + bound) * pages);
  };
  run.prefill(prompt);
  check(prompt);
  for (int step = 0; step < 16; ++step) run.step();
  run.step();  // the heads choose again, and pages that were filled go to the host
  check(prompt + 17);
}

TEST_CASE("flexicache: components") {
  const auto reads = [](const std::map<std::string, ParamValue>& params) {
    OnText run(Role::policy, "flexicache", params, most_tokens, prompt + steps, page, unstable);
    run.prefill(prompt);
    for (int step = 0; step < steps; ++step) run.step();
    std::vector<std::vector<std::vector<std::vector<int>>>> all;
    for (int layer = 0; layer < run.config().layers; ++layer) all.push_back(run.layer(layer).read);
    return all;
  };
  const ParamValue every{std::int64_t{period}};
  const auto normal = reads({{"rerank_every", every}});
  CHECK(reads({{"rerank_every", every}, {"frame_reuse", false}}) == normal);  // frames differ, pages do not
  // Off: every head chooses in each step, though new pages stay as before.
  const auto unaware = reads({{"rerank_every", every}, {"stability_aware", false}});
  CHECK(unaware != normal);
  const auto fixed = reads({{"rerank_every", every}, {"reranking", false}});
  CHECK(fixed != normal);
  for (std::size_t layer = 0; layer < normal.size(); ++layer)
    for (std::size_t head = 0; head < normal[layer][0].size(); ++head) {
      const bool free = unstable(static_cast<int>(layer), static_cast<int>(head));
      for (std::size_t step = 0; step < steps; ++step) {
        CAPTURE(layer, head, step);
        if (layer == 0 && free) CHECK(unaware[layer][step][head] == normal[layer][step][head]);
        // A stable head goes on reading what the prompt chose. New pages come.
        for (const int p : fixed[layer][0][head])
          if (!free && p < (prompt - period) / page)
            CHECK(std::count(fixed[layer][step][head].begin(), fixed[layer][step][head].end(), p) == 1);
      }
    }
}

namespace {

constexpr int given = prompt;  // the observer has a function of that name

// The pages of the prompt's older part that the heads of a layer read in each step, for sequences in one batch.
class Batch final : public EngineObserver {
 public:
  using Reads = std::vector<std::vector<std::set<int>>>;  // [step][layer and head]

  explicit Batch(std::vector<std::uint32_t> sequences) : engine_(model(), policy(), options()) {
    engine_.observe(this);
    for (const std::uint32_t number : sequences) slots_.push_back(engine_.open(number));
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      const std::vector<int> text = text_of(sequences[i], 0, given);
      REQUIRE(engine_.prefill(slots_[i], text, true, {}) == Fit::ok);
    }
    reads_.resize(slots_.size());
    for (int step = 0; step < steps; ++step) {
      for (Reads& of : reads_) of.emplace_back();
      std::vector<int> tokens;
      for (const std::uint32_t number : sequences) tokens.push_back(text_of(number, given + step, 1)[0]);
      REQUIRE(engine_.step(slots_, tokens, {}) == Fit::ok);
    }
  }
  void attended(const DecodeLayer& l, const Store&) override {
    for (std::size_t row = 0; row < slots_.size(); ++row)
      for (int head = 0; head < model()->config.kv_heads; ++head) {
        std::set<int>& pages = reads_[row].back().emplace_back();
        const PageList& list = *l.read.pages;
        const auto r = static_cast<std::int64_t>(row);
        for (int i = 0; i < list.count(r, head); ++i)
          if (list.index(r, head, i) < (given - period) / page) pages.insert(list.index(r, head, i));
      }
  }
  const Reads& of_row(std::size_t row) const { return reads_[row]; }

 private:
  static const std::shared_ptr<const Model>& model() {
    static const std::shared_ptr<const Model> recall =
        load_model(*open_model("bundled/recall", "", ""), DType::f32, "recall");
    return recall;
  }
  static std::shared_ptr<Policy> policy() {
    static Registry registry;
    PolicySpec spec;
    spec.name = "flexicache";
    spec.policy = PluginUse{Role::policy, spec.name,
                            resolve(registry.require(Role::policy, spec.name),
                                    {{"rerank_every", std::int64_t{period}}, {"unstable_heads", false}})};
    return build_policy(spec, RegistryCatalog(registry));
  }
  static EngineOptions options() {
    EngineOptions o;
    o.slots = 4;
    o.budget = {BudgetAmount::tokens, static_cast<double>(most_tokens)};
    o.max_tokens = given + steps;
    o.page_size = page;
    return o;
  }
  // Sequences have different parts of a text.
  static std::vector<int> text_of(std::uint32_t sequence, int first, int count) {
    static const std::vector<int> all = [] {
      std::ifstream in(golden("text/english.txt"), std::ios::binary);
      const std::string text{std::istreambuf_iterator<char>(in), {}};
      return model()->tokenizer->encode(text, false, false);
    }();
    const auto at = all.begin() + static_cast<std::ptrdiff_t>(sequence) * 97 + first;
    return {at, at + count};
  }

  Engine engine_;
  std::vector<std::int32_t> slots_;
  std::vector<Reads> reads_;
};

}  // namespace

TEST_CASE("flexicache: sequences that begin together choose in different steps, the same in any batch") {
  const std::vector<std::uint32_t> sequences{0, 1, 2, 7};
  const Batch together(sequences);
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    CAPTURE(sequences[i]);
    const Batch alone({sequences[i]});
    CHECK(alone.of_row(0) == together.of_row(i));
    // The step after a choice reads it.
    int changes = 0;
    for (int step = 1; step < steps; ++step)
      if (alone.of_row(0)[static_cast<std::size_t>(step)] != alone.of_row(0)[static_cast<std::size_t>(step) - 1]) {
        ++changes;
        CHECK((step - 1 + static_cast<int>(sequences[i])) % period == 0);
      }
    CHECK(changes > 0);
  }
}

// FreeKV's card has hand tests 2 and 3 of these rules; the sums are theirs. A page's keys are all (a, b, 0, ...) and
// the queries of the group unit vectors, so that a page scores a with one query and b with the other.
TEST_CASE("flexicache: pages of a group by hand vectors, by each rule") {
  struct Hand {
    OneHead::Vectors pages;
    const char* rule;
    std::vector<float> scores;
    std::vector<std::int32_t> best;
  };
  const OneHead::Vectors second{{10, 0}, {9, 9.5f}, {0, 10.5f}}, third{{40, 0}, {20, 2}, {0, 3}};
  const Hand hands[] = {
      {second, "max", {10, 9.5f, 10.5f}, {0, 2}},  {second, "mean", {5, 9.25f, 5.25f}, {1, 2}},
      {second, "sum", {10, 18.5f, 10.5f}, {1, 2}}, {second, "softmax_mean", {.36553f, .26894f, .36554f}, {0, 2}},
      {third, "max", {40, 20, 3}, {0, 1}},         {third, "mean", {20, 11, 1.5f}, {0, 1}},
      {third, "sum", {40, 22, 3}, {0, 1}},         {third, "softmax_mean", {.518f, .130f, .353f}, {0, 2}},
  };
  for (const Hand& hand : hands) {
    CAPTURE(hand.rule, hand.pages[0].first);
    OneHead run("flexicache",
                {{"group", std::string(hand.rule)}, {"unstable_heads", false}, {"stagger", false}, {"keep_new", false}},
                2 * OneHead::page, hand.pages, 3 * OneHead::page, 2);
    const std::vector<Edit> edits = run.prefill({{1, 0}, {0, 1}});
    REQUIRE(edits.size() == 1);
    REQUIRE(edits[0].verb == Edit::place);
    CHECK(OneHead::pages_of(edits[0]) == hand.best);
    for (int p = 0; p < 3; ++p)  // the order in which pages leave has the scores
      CHECK(edits[0].order(0, 0, p) == Approx(hand.scores[static_cast<std::size_t>(p)]).margin(5e-4));
  }
}
