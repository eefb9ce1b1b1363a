#include "layers.hpp"

#include "plugin/before_step.hpp"
#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr int prompt = 160, steps = 24;

// A token's greatest logit, or share of attention, over all heads; query of `position`, tokens of the prompt.
std::vector<double> greatest(const OnText& run, int layer, int position, bool softmaxed) {
  const auto& seen = run.layer(layer);
  std::vector<double> most(prompt, -INFINITY);
  for (std::size_t h = 0; h < static_cast<std::size_t>(run.config().heads); ++h) {
    const auto& q = seen.queries.at[static_cast<std::size_t>(position)][h];
    std::vector<double> row;
    for (std::size_t t = 0; t < prompt; ++t)
      row.push_back(dot(q, seen.keys.at[t][h / static_cast<std::size_t>(run.group())]) /
                    std::sqrt(static_cast<double>(q.size())));
    if (softmaxed) row = softmax(row);
    for (std::size_t t = 0; t < prompt; ++t) most[t] = std::max(most[t], row[t]);
  }
  return most;
}

// The sum over the newest queries of the greatest share that a head gives a token of the prompt before these queries.
std::vector<double> greatest_of_window(const OnText& run, int layer, int position, int window, bool exp) {
  const auto& seen = run.layer(layer);
  const auto before = static_cast<std::size_t>(std::clamp(position + 1 - window, 0, prompt));
  std::vector<double> sum(before);
  for (int age = 0; age < std::min(window, position + 1); ++age) {
    std::vector<double> most(before);
    for (std::size_t h = 0; h < static_cast<std::size_t>(run.config().heads); ++h) {
      const auto& q = seen.queries.at[static_cast<std::size_t>(position - age)][h];
      std::vector<double> row;
      for (std::size_t t = 0; t < before; ++t)
        row.push_back(dot(q, seen.keys.at[t][h / static_cast<std::size_t>(run.group())]) /
                      std::sqrt(static_cast<double>(q.size())));
      row = softmax(row);
      for (std::size_t t = 0; t < before; ++t) most[t] = std::max(most[t], row[t]);
    }
    for (std::size_t t = 0; t < before; ++t) sum[t] += most[t] * (exp ? std::pow(2., -age) : 1);
  }
  return sum;
}

// The tokens of a prompt of four that a step reads, two of them. `first`: logits of the first query head; the second
// one's stay. Heads share the KV head: element h of a key is head h's logit. The query before the step's looks at
// element 2 with both heads.
std::vector<int> chosen(const std::vector<float>& first, const std::string& score_by) {
  const std::vector<float> second{4, 1, 3, 0};
  PagedFixture cache({1, 1, 8, 4, 4});
  const std::vector<float> before{std::log(.02f), std::log(.03f), std::log(.95f), 0};
  const auto append = [&](float a, float b, float c) {
    cache.append(0, 0, {a, b, c, 0, 0, 0, 0, 0}, std::vector<float>(8));
  };
  Shape shape;
  shape.layers = 2, shape.max_slots = shape.kv_heads = 1, shape.query_heads = 2;
  shape.head_dim = 8, shape.page_size = 4, shape.max_tokens = 16;
  HeapWorkspace workspace;
  static Registry registry;
  const PluginInfo& info = registry.require(Role::policy, "omnikv");
  const auto policy = create<Policy>(info, resolve(info, {{"filter_layers", std::string("0")},
                                                          {"wait_layers", std::int64_t{0}},
                                                          {"score_by", score_by},
                                                          {"queries", std::int64_t{2}}}));
  policy->attach(shape, {BudgetAmount::tokens, 2}, workspace);
  std::int32_t slot = 0, position = 4, step = 0, budget = 2;
  PagedKv pages;
  const auto begin = [&](LayerKv& kv) {
    pages = cache.view();
    kv.shape = &shape, kv.pages = pages, kv.workspace = &workspace;
    kv.keys = {&pages, KvSide::key}, kv.values = {&pages, KvSide::value};
    kv.slots = &slot, kv.position = &position, kv.step = &step, kv.budget = &budget;
    kv.max_length = position;
  };
  for (std::size_t t = 0; t < 4; ++t) append(first[t], second[t], before[t]);
  const bool last = true;
  LayerPrefill whole;
  begin(whole);
  whole.last = &last;
  std::vector<float> window(32, 1);  // [head, query]
  for (const std::size_t at : {8, 24}) {
    std::fill_n(&window[at], 8, 0.f);
    window[at + 2] = std::sqrt(8.f);
  }
  whole.window_queries = View<const float, 4>::dense(window.data(), {1, 2, 2, 8});
  Edits none;
  policy->prefill(whole, none, Stream::cpu());
  append(0, 0, 0);  // the step's own token, which is read besides
  position = 5;
  tell_before_step(policy.get(), {.rows = 1, .slots = &slot, .position = &position, .step = &step, .budget = &budget});
  std::vector<float> queries(16);
  queries[0] = queries[9] = std::sqrt(8.f);
  std::vector<int> read;
  for (int layer = 0; layer < 2; ++layer) {
    LayerStep now;
    begin(now);
    now.layer = layer;
    now.queries = View<const float, 3>::dense(queries.data(), {1, 2, 8});
    Edits edits(layer);
    policy->select(now, edits, Stream::cpu());
    if (layer == 0) {
      CHECK(edits.all().empty());  // the filter layer reads everything
      continue;
    }
    REQUIRE(edits.all().size() == 1);
    REQUIRE(edits.all()[0].verb == Edit::attend_tokens);
    const IndexList& list = edits.all()[0].list;
    for (int i = 0; i < list.count(0, 0); ++i) read.push_back(list.index(0, 0, i));
  }
  std::sort(read.begin(), read.end());
  return read;
}

}  // namespace

// The card's vectors of two heads: raw logits and shares choose alike, until one head's logits are far apart.
TEST_CASE("omnikv: the card's two heads") {
  CHECK(chosen({1, 5, 2, 0}, "last") == std::vector<int>{0, 1, 4});
  CHECK(chosen({1, 5, 2, 0}, "softmax_before_last") == std::vector<int>{0, 1, 4});
  CHECK(chosen({1, 20, 18, 0}, "last") == std::vector<int>{1, 2, 4});
  CHECK(chosen({1, 20, 18, 0}, "softmax_before_last") == std::vector<int>{0, 1, 4});
}

// The window of two has the query before the step's, and so token 3. Of the others the step's query gives .705, .936
// and .260, and the one before gives .02, .03 and .95: 1.21 for token 2, or .73 with half of the latter.
TEST_CASE("omnikv: shares of the newest queries, by hand") {
  CHECK(chosen({1, 5, 2, 0}, "uniform") == std::vector<int>{2, 3, 4});
  CHECK(chosen({1, 5, 2, 0}, "exp") == std::vector<int>{1, 3, 4});
}

TEST_CASE("omnikv: what each layer does, by hand") {
  using omnikv::Role;
  // The card: of 32 layers, {0,1,2,3,8,9,18,19} are dense.
  const auto roles = omnikv::roles_of({2, 8, 18}, 1, 32, true);
  std::vector<int> whole;
  for (int l = 0; l < 32; ++l)
    if (roles[static_cast<std::size_t>(l)] != Role::sparse) whole.push_back(l);
  CHECK(whole == std::vector<int>{0, 1, 2, 3, 8, 9, 18, 19});
  CHECK(omnikv::roles_of({0, 2}, 0, 4, true) ==
        std::vector<Role>{Role::filter, Role::sparse, Role::filter, Role::sparse});
  CHECK(omnikv::roles_of({0}, 1, 3, false) == std::vector<Role>{Role::filter, Role::dense, Role::own});
  CHECK_THROWS_WITH(omnikv::roles_of({2, 8}, 1, 8, true),
                    Catch::Contains("got filter layer 8, wanted one of the model's 8"));
  CHECK_THROWS_WITH(omnikv::roles_of({1}, 1, 3, true), Catch::Contains("are all 3 layers"));
}

TEST_CASE("omnikv reads on real text what a plain implementation reads") {
  const bool softmaxed = GENERATE(false, true), shared = GENERATE(true, false);
  CAPTURE(softmaxed, shared);
  constexpr int tokens = 20, page = 8;
  OnText run(Role::policy, "omnikv",
             {{"filter_layers", std::string("1,4")},
              {"score_by", std::string(softmaxed ? "softmax_before_last" : "last")},
              {"shared_choice", shared},
              {"offload", true}},
             tokens, prompt + steps, page);
  const std::vector<int> filter_of{-1, -1, -1, 1, -1, -1, 4, 4};
  REQUIRE(run.config().layers == static_cast<int>(filter_of.size()));
  run.prefill(prompt);
  for (int step = 0; step < steps; ++step) {
    run.step();
    for (int layer = 0; layer < run.config().layers; ++layer) {
      CAPTURE(step, layer);
      const auto& read = run.layer(layer).read[static_cast<std::size_t>(step)];
      const int filter = filter_of[static_cast<std::size_t>(layer)];
      if (filter < 0) {
        CHECK(read.empty());
        CHECK(run.pages_on(Tier::host, layer, 0).empty());
        continue;
      }
      std::vector<int> wanted =
          best(greatest(run, shared ? filter : layer, prompt + step, softmaxed), positions_to(prompt), tokens);
      for (int p = prompt; p <= prompt + step; ++p) wanted.push_back(p);
      REQUIRE(read.size() == static_cast<std::size_t>(run.config().kv_heads));
      for (std::vector<int> head : read) {
        std::sort(head.begin(), head.end());
        CHECK(head == wanted);
      }
      CHECK(run.kept(layer, 0) == positions_to(prompt + step + 1));
      // A page that the step's token opened is there, too, and so is the full one that was the newest before.
      std::set<int> pages{(prompt + step) / page, (prompt + step - 1) / page};
      for (const int t : shared ? wanted : positions_to(prompt + step + 1)) pages.insert(t / page);
      for (int head = 0; head < run.config().kv_heads; ++head) {
        const auto device = run.pages_on(Tier::device, layer, head);
        CHECK(std::set<int>(device.begin(), device.end()) == pages);
        CHECK(run.pages_on(Tier::host, layer, head).size() >= (shared ? (prompt + step) / page : 0U));
      }
    }
  }
}

TEST_CASE("omnikv: the newest queries choose on real text what a plain implementation chooses") {
  const auto [exp, shared, window] =
      GENERATE(table<bool, bool, int>({{false, true, 16}, {true, true, 16}, {false, false, 5}, {true, true, 200}}));
  CAPTURE(exp, shared, window);
  const int tokens = std::max(20, window);
  OnText run(Role::policy, "omnikv",
             {{"filter_layers", std::string("1,4")},
              {"score_by", std::string(exp ? "exp" : "uniform")},
              {"queries", std::int64_t{window}},
              {"shared_choice", shared}},
             tokens, prompt + steps, 8);
  const std::vector<int> filter_of{-1, -1, -1, 1, -1, -1, 4, 4};
  run.prefill(prompt);
  for (int step = 0; step < steps; ++step) {
    run.step();
    const int position = prompt + step, in_window = std::clamp(window - step - 1, 0, prompt);
    for (int layer = 0; layer < run.config().layers; ++layer) {
      CAPTURE(step, layer);
      const int filter = filter_of[static_cast<std::size_t>(layer)];
      if (filter < 0) continue;
      const auto scores = greatest_of_window(run, shared ? filter : layer, position, window, exp);
      const auto count = std::min(scores.size(), static_cast<std::size_t>(std::max(1, tokens - in_window)));
      std::vector<int> wanted = best(scores, positions_to(static_cast<int>(scores.size())), count);
      for (int p = prompt - in_window; p <= position; ++p) wanted.push_back(p);
      for (std::vector<int> head : run.layer(layer).read[static_cast<std::size_t>(step)]) {
        std::sort(head.begin(), head.end());
        CHECK(head == wanted);
      }
    }
  }
}

TEST_CASE("omnikv: without offload all pages stay on the device, and it reads the same") {
  const auto run_with = [](bool offload) {
    auto run = std::make_unique<OnText>(
        Role::policy, "omnikv",
        std::map<std::string, ParamValue>{{"filter_layers", std::string("1,4")}, {"offload", offload}}, 20, 240, 8);
    run->prefill(prompt);
    for (int step = 0; step < 10; ++step) run->step();
    run->prefill(30);  // the next turn
    for (int step = 0; step < 10; ++step) run->step();
    return run;
  };
  const auto away = run_with(true), here = run_with(false);
  CHECK(away->ledger().moved_total(Tier::device) > 0);
  CHECK(here->ledger().moved_total(Tier::host) == 0);
  for (int layer = 0; layer < away->config().layers; ++layer) {
    CHECK(away->layer(layer).read == here->layer(layer).read);
    CHECK(away->layer(layer).outputs.at == here->layer(layer).outputs.at);
  }
}

TEST_CASE("omnikv: a ratio is one of the prompt, and a short prompt is read as a whole") {
  const auto read = [](int tokens, int of_prompt) {
    OnText run(Role::policy, "omnikv", {{"filter_layers", std::string("0")}, {"wait_layers", std::int64_t{0}}}, tokens,
               64, 8);
    run.prefill(of_prompt);
    run.step();
    run.step();
    return run.layer(5).read[1][2].size();
  };
  CHECK(read(7, 30) == 7 + 2);
  CHECK(read(40, 30) == 30 + 2);
  CHECK(read(40, 1) == 1 + 2);
}

TEST_CASE("omnikv: what it cannot obey is refused") {
  const auto with = [](const std::string& layers, int budget) {
    return OnText(Role::policy, "omnikv", {{"filter_layers", layers}}, budget, 64, 8);
  };
  CHECK_THROWS_WITH(with("", 16), Catch::Contains("got filter_layers '', wanted at least one layer"));
  CHECK_THROWS_WITH(with("2,8,18", 16), Catch::Contains("got filter layer 18, wanted one of the model's 8 layers"));
  CHECK_THROWS_WITH(with("4,2", 16), Catch::Contains("got filter_layers '4,2', wanted layers from 0 on"));
  // The first step reads 15 tokens of the prompt in any case.
  const auto by_newest = [](int budget) {
    return OnText(Role::policy, "omnikv", {{"filter_layers", std::string("2")}, {"score_by", std::string("exp")}},
                  budget, 64, 8);
  };
  CHECK_THROWS_WITH(by_newest(15),
                    Catch::Contains("got a budget of 15 tokens, wanted at least 16: the prompt's tokens among"));
  CHECK_NOTHROW(by_newest(16));
}
