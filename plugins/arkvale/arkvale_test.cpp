#include "support/on_text.hpp"
#include "support/one_head.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr int page = 8, prompt = 200, steps = 40, most_tokens = 96, sinks = 10, window = 14, top = 24;
constexpr int pinned = 5;  // pages: two of sinks, and 14 tokens lie in three at most

std::map<std::string, ParamValue> params(std::map<std::string, ParamValue> more) {
  more["sinks"] = std::int64_t{sinks}, more["window"] = std::int64_t{window}, more["top"] = std::int64_t{top};
  more["dense_layers"] = std::int64_t{1};
  return more;
}

// The pages of one head on the device, by the card.
class Plain {
 public:
  Plain(bool mean_radius, bool keep_best) : mean_radius_(mean_radius), keep_best_(keep_best) {}

  // The pages that are on the device in any case, for this position's query.
  std::set<int> must(const OnText& run, int layer, int head, int position, std::size_t pages) {
    const auto& seen = run.layer(layer);
    score_.clear();
    for (const auto& of_query : page_bounds(seen.queries, seen.keys, static_cast<std::size_t>(position), head,
                                            run.group(), page, mean_radius_)) {
      score_.resize(of_query.size());
      for (std::size_t i = 0; i < of_query.size(); ++i) score_[i] += of_query[i] / run.group();
    }
    std::vector<double> scores;
    std::vector<int> between;
    for (int p = (sinks + page - 1) / page; p < (position + 1 - window) / page; ++p) {
      between.push_back(p);
      scores.push_back(score_[static_cast<std::size_t>(p)]);
    }
    const auto chosen = best(scores, between, pages);
    std::set<int> all(chosen.begin(), chosen.end());
    for (int p = 0; p <= position / page; ++p)
      if (!std::count(between.begin(), between.end(), p)) all.insert(p);
    return all;
  }
  void place(const std::set<int>& must, int newest) {
    on.insert(newest);
    std::vector<int> others;
    for (const int p : on)
      if (!must.contains(p)) others.push_back(p);
    if (keep_best_)
      std::sort(others.begin(), others.end(), [&](int a, int b) {
        return score_[static_cast<std::size_t>(a)] < score_[static_cast<std::size_t>(b)];
      });
    const std::size_t room = most_tokens / page, stay = room > must.size() ? room - must.size() : 0;
    left = others.size() > stay ? static_cast<int>(others.size() - stay) : 0;
    on = must;
    on.insert(others.begin() + left, others.end());
  }

  std::set<int> on;
  int left = 0;

 private:
  bool mean_radius_, keep_best_;
  std::vector<double> score_;
};

}  // namespace

TEST_CASE("arkvale reads on real text what a plain implementation reads, with and without its components") {
  const std::string off = GENERATE("nothing", "mean_radius", "keep_best", "resident");
  CAPTURE(off);
  const bool resident = off != "resident";
  auto given = params({});
  if (off != "nothing") given[off] = false;
  OnText run(Role::policy, "arkvale", given, most_tokens, prompt + steps, page);
  run.prefill(prompt);
  std::map<std::pair<int, int>, Plain> heads;
  for (int layer = 1; layer < run.config().layers; ++layer)
    for (int head = 0; head < run.config().kv_heads; ++head) {
      Plain plain(off != "mean_radius", off != "keep_best");
      for (int p = 0; p * page < prompt; ++p) plain.on.insert(p);
      plain.place(plain.must(run, layer, head, prompt - 1, most_tokens / page - pinned), (prompt - 1) / page);
      const auto device = run.pages_on(Tier::device, layer, head);
      CHECK(std::set<int>(device.begin(), device.end()) == plain.on);
      CHECK(plain.on.size() <= most_tokens / page);
      heads.emplace(std::pair{layer, head}, std::move(plain));
    }
  int left = 0;
  for (int step = 0; step < steps; ++step) {
    run.step();
    const int position = prompt + step;
    CHECK(run.layer(0).read[static_cast<std::size_t>(step)].empty());  // the dense layer
    for (auto& [at, plain] : heads) {
      const auto [layer, head] = at;
      CAPTURE(step, layer, head);
      const auto must = plain.must(run, layer, head, position, top / page);
      plain.place(must, position / page);
      left += plain.left;
      const auto& read = run.layer(layer).read[static_cast<std::size_t>(step)][static_cast<std::size_t>(head)];
      CHECK(std::set<int>(read.begin(), read.end()) == (resident ? plain.on : must));
      const auto device = run.pages_on(Tier::device, layer, head);
      CHECK(std::set<int>(device.begin(), device.end()) == plain.on);
      CHECK(static_cast<int>(run.pages_on(Tier::host, layer, head).size()) >= position / page);
    }
  }
  CHECK(left > 20);
}

TEST_CASE("arkvale: the budget pays for sinks, window and a page") {
  CHECK_THROWS_WITH(OnText(Role::policy, "arkvale", params({}), (pinned + 1) * page - 1, 64, page),
                    Catch::Contains("wanted at least 48"));
  // Half of a small budget, and what sinks and window leave of it.
  const auto read = [](int budget, std::int64_t best) {
    auto given = params({{"resident", false}});
    given["top"] = best;
    OnText run(Role::policy, "arkvale", given, budget, prompt + 1, page);
    run.prefill(prompt);
    run.step();
    return run.layer(1).read[0][0].size();
  };
  const std::size_t beside = 2 + 3;  // pages of the sinks, and of the 14 newest of 201 tokens
  CHECK(read((pinned + 1) * page, 1280) == beside + 1);
  CHECK(read(96, 1280) == beside + 96 / 2 / page);
  CHECK(read(96, 16) == beside + 2);
}

// The method card's hand test: six pages, of which one is a sink's and two are the window's. Pages 1 and 6 are the best
// of 1 to 7. Of the others that are there, 3 and 5 have the lowest scores.
TEST_CASE("arkvale: the victims of the card's hand test leave") {
  const OneHead::Vectors keys{{0, 0}, {9, 0}, {1, 0}, {2, 0}, {7, 0}, {3, 0}, {8, 0}, {0, 0}, {50, 0}, {50, 0}};
  OneHead run("arkvale",
              {{"sinks", std::int64_t{4}},
               {"window", std::int64_t{2}},
               {"top", std::int64_t{8}},
               {"dense_layers", std::int64_t{0}}},
              24, keys, 37, 1);
  std::int32_t there[] = {3, 4, 5}, count = 3;
  PageList list;
  list.index = View<std::int32_t, 3>::dense(there, {1, 1, 3});
  list.count = View<std::int32_t, 2>::dense(&count, {1, 1});
  Edits before;
  before.place(list, {.pins = {.first = 4, .last = 2}});
  run.apply(before.all()[0]);
  REQUIRE(run.on_device() == std::vector<std::int32_t>{0, 3, 4, 5, 8, 9});
  const std::vector<Edit> edits = run.select({{1, 0}});
  REQUIRE(edits.size() == 2);
  REQUIRE(edits[0].verb == Edit::place);
  CHECK(OneHead::pages_of(edits[0]) == std::vector<std::int32_t>{1, 6});
  run.apply(edits[0]);
  CHECK(run.on_device() == std::vector<std::int32_t>{0, 1, 4, 6, 8, 9});
  CHECK(edits[1].resident);
}

// The method card's memory of a sequence, in the tags of the ledger. The device has the capacity's pages of each head
// and digests of all pages, the host every page that is full.
TEST_CASE("arkvale takes the bytes of the method's formula") {
  OnText run(Role::policy, "arkvale", params({}), most_tokens, prompt + steps, page);
  const std::int64_t d = run.config().head_dim, b = 4, heads = run.config().kv_heads, layers = run.config().layers;
  const auto check = [&](std::int64_t n) {
    CAPTURE(n);
    const std::int64_t pages = (n + page - 1) / page, bound = heads * (layers - 1);
    const auto of = [&](Tier tier, Tag tag) { return run.ledger().held(tier)[static_cast<std::size_t>(tag)]; };
    const auto kv = [&](Tier tier) { return of(tier, Tag::keys) + of(tier, Tag::values); };
    CHECK(kv(Tier::device) == 2 * d * b * page * (heads * pages + bound * (most_tokens / page)));
    CHECK(kv(Tier::host) == 2 * d * b * page * bound * (n / page));
    CHECK(of(Tier::device, Tag::summaries) == 2 * d * b * heads * layers * pages);
  };
  run.prefill(prompt);
  check(prompt);
  for (int step = 0; step < 17; ++step) run.step();
  check(prompt + 17);
}
