#include <tuple>

#include "store/cpu_store.hpp"
#include "support/on_text.hpp"
#include "support/one_head.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr int page = 8, prompt = 200, steps = 20, most_tokens = 96, sinks = 10, window = 14;
constexpr std::size_t selected = (most_tokens - sinks - window) / page;

// The selector: of the paper, with a scale on page scores before the softmax, or of the code that was timed.
struct Selecting {
  double scale = 1;
  bool timed = false;
};

// The best pages that hold neither a sink nor a token of the window.
std::vector<int> best_pages(const OnText& run, int layer, int head, int position, const Selecting& by) {
  const auto& seen = run.layer(layer);
  const auto bounds =
      page_bounds(seen.queries, seen.keys, static_cast<std::size_t>(position), head, run.group(), page, by.timed);
  const int first = (sinks + page - 1) / page, last = (position + 1 - window) / page;
  std::vector<double> score(static_cast<std::size_t>(last - first));
  for (const auto& of_query : bounds) {
    std::vector<double> scaled(of_query.begin() + first, of_query.begin() + last);
    for (double& x : scaled) x *= by.scale;
    const auto share = by.timed ? scaled : softmax(scaled);
    for (std::size_t i = 0; i < score.size(); ++i) score[i] += share[i] / run.group();
  }
  std::vector<int> pages;
  for (int p = first; p < last; ++p) pages.push_back(p);
  return best(score, pages, selected);
}

double cosine(const OnText& run, int layer, int head, int position) {
  const auto& q = run.layer(layer).queries.at;
  double sum = 0;
  for (int g = head * run.group(); g < (head + 1) * run.group(); ++g) {
    const auto &a = q[static_cast<std::size_t>(position)][static_cast<std::size_t>(g)],
               &b = q[static_cast<std::size_t>(position) - 1][static_cast<std::size_t>(g)];
    sum += dot(a, b) / std::sqrt(dot(a, a) * dot(b, b));
  }
  return sum / run.group();
}

std::set<int> with_pins(const std::vector<int>& pages, int position) {
  std::set<int> all(pages.begin(), pages.end());
  for (int p = 0; p * page < sinks; ++p) all.insert(p);
  for (int p = (position + 1 - window) / page; p <= position / page; ++p) all.insert(p);
  return all;
}

std::map<std::string, ParamValue> params(std::map<std::string, ParamValue> more) {
  more["sinks"] = std::int64_t{sinks}, more["window"] = std::int64_t{window};
  return more;
}

}  // namespace

TEST_CASE("freekv reads on real text what a plain implementation reads, with and without its components") {
  // An eighth is 1/sqrt(64), the other scale of the authors' code for heads of so many dimensions.
  struct Way {
    bool speculation;
    double threshold;
    Selecting by;
    bool by_word = false;
  };
  const auto [speculation, threshold, by, by_word] =
      GENERATE(Way{true, .7, {}}, Way{true, -2., {}}, Way{false, .7, {}}, Way{true, 0., {}}, Way{true, -.5, {}},
               Way{true, .7, {.scale = .125}}, Way{true, .7, {.scale = .125}, true}, Way{true, .7, {.timed = true}});
  CAPTURE(speculation, threshold, by.scale, by.timed, by_word);
  auto given = params({{"speculation", speculation}});
  if (by_word)
    given["scores"] = std::string("scaled");
  else
    given["scale"] = by.scale;
  if (by.timed) given["summary"] = std::string("centre_radius"), given["group"] = std::string("mean");
  if (threshold < -1)
    given["correction"] = false;
  else
    given["threshold"] = threshold;
  OnText run(Role::policy, "freekv", given, most_tokens, prompt + steps, page);
  if (by_word) REQUIRE(run.config().head_dim == 64);
  run.prefill(prompt);
  int turned = 0, calm = 0, apart = 0;
  for (int step = 0; step < steps; ++step) {
    run.step();
    const int position = prompt + step;
    for (int layer = 0; layer < run.config().layers; ++layer)
      for (int head = 0; head < run.config().kv_heads; ++head) {
        CAPTURE(step, layer, head);
        const auto& read = run.layer(layer).read[static_cast<std::size_t>(step)];
        if (layer == 0) {
          CHECK(read.empty());  // the dense layer
          continue;
        }
        // The first step has no query before it, so it chooses with its own, whatever the threshold.
        const bool corrects = !speculation || step == 0 || cosine(run, layer, head, position) < threshold;
        (corrects ? turned : calm) += 1;
        const auto wanted = with_pins(best_pages(run, layer, head, corrects ? position : position - 1, by), position);
        const auto& got = read[static_cast<std::size_t>(head)];
        CHECK(std::set<int>(got.begin(), got.end()) == wanted);
        if (step == 0) apart += wanted != with_pins(best_pages(run, layer, head, position - 1, by), position);
        // After the step the pages of this step's query are there, for the next one.
        const auto device = run.pages_on(Tier::device, layer, head);
        CHECK(std::set<int>(device.begin(), device.end()) ==
              with_pins(best_pages(run, layer, head, position, by), position));
      }
  }
  if (speculation && threshold > 0) CHECK((turned > 20 && calm > 20));
  CHECK(apart > 0);  // the prompt's last query chooses other pages
}

// The method card's memory of a sequence, in the tags of the ledger. Each head has its budget's pages, summaries of all
// pages, and the last query. Sinks and the window may begin and end within pages.
TEST_CASE("freekv takes the bytes of the method's formula") {
  OnText run(Role::policy, "freekv", params({}), most_tokens, prompt + steps, page);
  const std::int64_t d = run.config().head_dim, b = 4, heads = run.config().kv_heads, layers = run.config().layers;
  const auto check = [&](std::int64_t n) {
    CAPTURE(n);
    const std::int64_t pages = (n + page - 1) / page, chosen = most_tokens / page;
    const auto of = [&](Tier tier, Tag tag) { return run.ledger().held(tier)[static_cast<std::size_t>(tag)]; };
    const auto kv = [&](Tier tier) { return of(tier, Tag::keys) + of(tier, Tag::values); };
    const std::int64_t dense = heads * pages, bound = heads * (layers - 1);
    CHECK(kv(Tier::device) >= 2 * d * b * page * (dense + bound * chosen));
    CHECK(kv(Tier::device) <= 2 * d * b * page * (dense + bound * (chosen + 2)));
    CHECK(kv(Tier::host) == 2 * d * b * page * bound * (n / page));
    CHECK(of(Tier::device, Tag::summaries) == 2 * d * b * heads * layers * pages);
    CHECK(of(Tier::device, Tag::workspace) >= d * b * layers * heads * run.group());
  };
  run.prefill(prompt);
  check(prompt);
  for (int step = 0; step < 16; ++step) run.step();
  check(prompt + 16);
}

// The paper's setting: 16 pages of sinks, 32 selected and 16 of the window.
TEST_CASE("freekv: a budget pays for sinks, window and selected pages") {
  CHECK_THROWS_WITH(OnText(Role::policy, "freekv", params({}), sinks + window + page - 1, 64, page),
                    Catch::Contains("wanted at least 32"));
  LayerKv kv;
  const std::int32_t budgets[] = {2048, 2048}, slots[] = {0, 1};
  kv.pages.rows = 2, kv.pages.kv_heads = 1, kv.pages.page_size = 32, kv.pages.slots = slots;
  kv.budget = budgets;
  const ops::PageCounts pages = ops::budget_pages(kv, [](int tokens) { return tokens - 512 - 512; });
  CHECK(pages.same == 32);
  CHECK_FALSE(pages.each);
}

// The method card's hand tests 2 and 3. A page's keys are all (a, b, 0, ...), and the queries of the group are the
// first two unit vectors, so that a page scores a with one query and b with the other.
TEST_CASE("freekv: pages of a group by the card's hand vectors, in both scales") {
  struct Hand {
    std::vector<std::pair<float, float>> pages;
    GroupRule rule;
    float scale;
    std::vector<float> scores;
    std::vector<std::int32_t> best;
  };
  const std::vector<std::pair<float, float>> second{{10, 0}, {9, 9.5f}, {0, 10.5f}}, third{{40, 0}, {20, 2}, {0, 3}};
  const float of_128 = 1 / std::sqrt(128.f);
  const Hand hands[] = {
      {second, GroupRule::softmax_mean, 1, {.36553f, .26894f, .36554f}, {0, 2}},
      {second, GroupRule::mean, 1, {5, 9.25f, 5.25f}, {1, 2}},
      {second, GroupRule::max, 1, {10, 9.5f, 10.5f}, {0, 2}},
      // By hand: logits (.8839, .7955, 0) and (0, .8397, .9281).
      {second, GroupRule::softmax_mean, of_128, {.30033f, .39466f, .30502f}, {1, 2}},
      {third, GroupRule::softmax_mean, 1, {.518f, .130f, .353f}, {0, 2}},
      {third, GroupRule::mean, 1, {20, 11, 1.5f}, {0, 1}},
      {third, GroupRule::max, 1, {40, 20, 3}, {0, 1}},
  };
  for (const Hand& hand : hands) {
    CAPTURE(static_cast<int>(hand.rule), hand.scale, hand.pages[0].first);
    StoreOptions o;
    o.shape.layers = o.shape.kv_heads = o.shape.max_slots = 1;
    o.shape.query_heads = 2, o.shape.head_dim = 8, o.shape.page_size = 4, o.shape.max_tokens = 16;
    o.shape.dtype = DType::f32;
    o.summary = Summary::min_max;
    CpuStore store(o);
    const int slot = store.open();
    std::vector<float> k;
    for (const auto& [a, b] : hand.pages)
      for (int t = 0; t < 4; ++t) k.insert(k.end(), {a, b, 0, 0, 0, 0, 0, 0});
    k.insert(k.end(), 8, 50.f);  // a token of the newest page, which is no candidate
    REQUIRE(store.append(0, slot, k.data(), k.data(), 13, 0) == Fit::ok);
    const std::vector<std::int32_t> rows{slot};
    LayerKv kv;
    kv.shape = &store.shape();
    kv.pages = store.view(0, rows);
    kv.summaries = store.summaries(0);
    kv.workspace = &store.workspace();
    kv.max_length = 13;
    std::vector<float> q(16);
    q[0] = q[9] = 1;
    PageChoice choice;
    choice.rule = hand.rule, choice.scale = hand.scale, choice.leave_out = {.last = 1};
    const auto list = kv.list<PageList>("best", 4);
    const Scores scores = ops::choose_pages(kv, View<const float, 3>::dense(q.data(), {1, 2, 8}), choice,
                                            ops::PageCounts{.same = 2}, list, Stream::cpu());
    for (int p = 0; p < 3; ++p) CHECK(scores(0, 0, p) == Approx(hand.scores[static_cast<std::size_t>(p)]).margin(5e-4));
    REQUIRE(list.count(0, 0) == 2);
    CHECK(std::vector<std::int32_t>{list.index(0, 0, 0), list.index(0, 0, 1)} == hand.best);
  }
}

// The method card's hand test 4: queries of length 1 at given cosines to those before.
TEST_CASE("freekv: a head has turned by the card's cosines") {
  for (const auto& [second, turned] : {std::pair{.6f, true}, std::pair{.72f, false}}) {
    CAPTURE(second);
    OneHead run("freekv",
                {{"sinks", std::int64_t{0}},
                 {"window", std::int64_t{1}},
                 {"dense_layers", std::int64_t{0}},
                 {"threshold", 0.8}},
                2 * OneHead::page, {{1, 0}, {0, 1}, {1, 1}, {2, 0}}, 3 * OneHead::page + 1, 2);
    const auto chooses = [&](const OneHead::Vectors& queries) {
      const std::vector<Edit> edits = run.select(queries);
      REQUIRE(edits[0].verb == Edit::place);
      return edits[0].heads.on(0, 0);
    };
    CHECK(chooses({{1, 0}, {1, 0}}));  // of the first step
    CHECK(chooses({{.9f, std::sqrt(1 - .9f * .9f)}, {second, std::sqrt(1 - second * second)}}) == turned);
  }
}
