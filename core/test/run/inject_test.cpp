// Injected page lists must appear in the trace of the cell that runs with them.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <cmath>
#include <filesystem>
#include <map>

#include "base/log.hpp"
#include "experiment/experiment.hpp"
#include "run/answer.hpp"
#include "run/cell.hpp"
#include "run/prepare.hpp"
#include "run/recorded.hpp"
#include "support/cell_fixture.hpp"
#include "support/drifting.hpp"
#include "support/labels.hpp"

using namespace kvlab;

namespace {

using Pages = std::vector<std::int32_t>;

constexpr int page_size = 4, most = 10;  // tokens of a page, pages of a list

std::string temporary(const char* name) {
  return (std::filesystem::temp_directory_path() / (name + std::to_string(getpid()) + ".h5")).string();
}

void write(const std::string& file, const results::CellResult& cell) {
  results::write_part(file, cell, {});
  results::rebuild(file, {}, {cell.id});
}

void remove(const std::string& file) {
  std::filesystem::remove(file);
  std::filesystem::remove_all(file + ".parts");
}

struct Removed {
  std::string file;
  ~Removed() { remove(file); }
};

// Four prompts of the tiny model under quest, two in a batch.
struct Cells : test::CellFixture {
  Cells()
      : CellFixture(test::tiny_model("llama-gqa3"),
                    test::policy_of("{quest: {dense_layers: 0, budget: {tokens: 40}}}", page_size), {Metric::trace}) {
    experiment.batch = 2;
    for (int i = 0; i < 4; ++i)
      add(test::test_text(120 + 7 * i, model->config.vocab, static_cast<unsigned>(i)), {}, 12);
  }
  results::CellResult run() {
    auto out = CellFixture::run();
    CHECK(out.summary.error == "");
    return out;
  }
  // Writes the lists of this cell to a file and injects them from it.
  void follow(const results::CellResult& traced) {
    const std::string file = temporary("kvlab-recorded");
    write(file, traced);
    const Removed removed{file};
    recorded = std::make_shared<RecordedTrace>(read_recorded(file, ""));
    experiment.inject.trace = "recorded";
  }
  int room() const {
    int tokens = 0;
    for (const Item& item : items.items) tokens = std::max(tokens, item.most_tokens());
    return (tokens + page_size - 1) / page_size;
  }
};

// Two samples of three questions. The second question is a turn that follows the first.
struct Talks : Cells {
  explicit Talks(bool shared) {
    items.items.clear();
    for (int s = 0; s < 2; ++s) {
      const auto seed = static_cast<unsigned>(s);
      const auto context = test::test_text(100 + 9 * s, model->config.vocab, seed);
      for (int q = 0; q < 3; ++q) {
        auto question = test::test_text(3 + q + s, model->config.vocab, 10 + 3 * seed + static_cast<unsigned>(q));
        add(context, {}, 5 + 2 * q + s, q == 1);
        Item& item = items.items.back();
        item.sample = s, item.question = q;
        item.shared = shared && q != 1;
        auto& to = shared || q == 1 ? item.fed : item.prompt;
        to.insert(to.end(), question.begin(), question.end());
      }
    }
    place_turns();
  }
  void retell() {
    for (Item& item : items.items)
      for (std::vector<int>* text : {&item.prompt, &item.fed})
        for (int& token : *text) token = (token + 11) % model->config.vocab;
  }
  // Computes the turns' prompts as make_items does.
  void place_turns() {
    for (std::size_t i = 1; i < items.items.size(); ++i)
      if (Item& item = items.items[i], &last = items.items[i - 1]; item.follows) {
        item.prompt = last.prompt;
        item.before = last.most_tokens() - static_cast<int>(last.prompt.size());
      }
  }
};

// The lists of all steps, by sample, layer and KV head.
std::map<std::array<int, 3>, std::vector<Pages>> lists_of(const results::Trace& t) {
  std::map<std::array<int, 3>, std::vector<Pages>> out;
  for (const auto& e : t.events)
    out[{e.sample, e.layer, e.kv_head}].emplace_back(t.selected.begin() + e.begin,
                                                     t.selected.begin() + e.begin + e.count);
  return out;
}

std::size_t shared(const Pages& a, const Pages& b) {
  Pages both;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
  return both.size();
}

}  // namespace

TEST_CASE("the overlap of traced lists is the injected one") {
  for (const double overlap : {0., 0.5, 0.83, 1.}) {
    CAPTURE(overlap);
    Cells cells;
    cells.experiment.inject.overlap = overlap;
    const auto result = cells.run();
    CHECK(test::lasting_labels(result.summary) == "injected");
    int compared = 0;
    for (const auto& [place, lists] : lists_of(result.trace))
      for (std::size_t i = 1; i < lists.size(); ++i, ++compared) {
        REQUIRE(lists[i].size() == most);
        CHECK(std::adjacent_find(lists[i].begin(), lists[i].end(), std::greater_equal<>()) == lists[i].end());
        const auto wanted = static_cast<std::size_t>(std::lround(overlap * most));
        // Every list has the newest page. A new newest page takes the place of a shared one. The same newest page is
        // shared even at overlap 0.
        const bool same_newest = lists[i].back() == lists[i - 1].back();
        const std::size_t least = same_newest ? 1 : 0, greatest = most - (same_newest ? 0 : 1);
        CHECK(shared(lists[i], lists[i - 1]) == std::clamp(wanted, least, greatest));
      }
    CHECK(compared > 100);
  }
}

TEST_CASE("the mean overlap of the lists of a result file is the injected one") {
  for (const double overlap : {0.3, 0.8}) {
    Cells cells;
    cells.experiment.inject.overlap = overlap;
    const std::string file = temporary("kvlab-overlap");
    write(file, cells.run());
    const results::Trace trace = results::read_cell(file, "cell").trace;
    remove(file);
    double sum = 0;
    int steps = 0;
    for (const auto& [place, lists] : lists_of(trace))
      for (std::size_t i = 1; i < lists.size(); ++i, ++steps)
        sum += static_cast<double>(shared(lists[i], lists[i - 1])) / static_cast<double>(lists[i].size());
    REQUIRE(steps > 100);
    CHECK(sum / steps == Approx(overlap).margin(1e-9));  // overlap * 10 pages is a whole number for both
  }
}

TEST_CASE("a sequence has the lists that it has in any other slot, beside any others") {
  Cells cells;
  cells.experiment.inject.overlap = 0.5;
  cells.experiment.batch = 1;
  const auto alone = cells.run();
  const auto wanted = lists_of(alone.trace);
  const auto same = [&](const results::CellResult& other) {
    CHECK(lists_of(other.trace) == wanted);
    for (std::size_t i = 0; i < alone.samples.size(); ++i) CHECK(other.samples[i].output == alone.samples[i].output);
  };
  cells.experiment.batch = 2;
  same(cells.run());
  cells.experiment.batch = 4;
  same(cells.run());
  // In reverse order each item keeps the number of its sample.
  std::reverse(cells.items.items.begin(), cells.items.items.end());
  const auto turned = cells.run();
  const auto lists = lists_of(turned.trace);
  for (const auto& [place, own] : wanted) CHECK(lists.at({3 - place[0], place[1], place[2]}) == own);
  for (std::size_t i = 0; i < 4; ++i) CHECK(turned.samples[i].output == alone.samples[3 - i].output);
  CHECK(wanted.at({0, 0, 0}) != wanted.at({1, 0, 0}));
}

TEST_CASE("a cell without injection, or without a selector, has no such label") {
  Cells cells;
  const auto own = cells.run();
  CHECK(test::lasting_labels(own.summary).empty());
  cells.experiment.inject.overlap = 0.5;
  CHECK(lists_of(cells.run().trace) != lists_of(own.trace));
  cells.experiment.policies = {test::full_spec()};
  CHECK(test::lasting_labels(cells.run().summary).empty());
}

namespace {

constexpr int pinned = 8;  // tokens: sinks, and as many of the window

// Prompts of the same length under FreeKV, with ten chosen pages beside two of sinks and those of the window.
struct Speculation : Cells {
  static constexpr int prompt = 120, answer = 24;

  explicit Speculation(const std::string& more = "dense_layers: 0") {
    experiment.policies = {
        test::policy_of("{freekv: {sinks: 8, window: 8, budget: {tokens: 56}, " + more + "}}", page_size)};
    items.items.clear();
    for (unsigned i = 0; i < 4; ++i) add(test::test_text(prompt, model->config.vocab, i), {}, answer);
  }
};

// The pages of each traced list that hold neither sinks nor the window.
std::map<std::array<int, 3>, std::vector<Pages>> chosen_of(const results::Trace& t) {
  auto out = lists_of(t);
  for (auto& [place, lists] : out)
    for (std::size_t step = 0; step < lists.size(); ++step) {
      const int tokens = Speculation::prompt + static_cast<int>(step) + 1;
      std::erase_if(lists[step],
                    [&](int page) { return page < pinned / page_size || page >= (tokens - pinned) / page_size; });
    }
  return out;
}

}  // namespace

TEST_CASE("a policy's lists have the injected overlap each time that a head chooses") {
  for (const double overlap : {0., .5, .7, 1.}) {
    CAPTURE(overlap);
    for (const double correction : {0., 1.}) {
      CAPTURE(correction);
      Speculation cells;
      cells.experiment.inject.overlap = overlap;
      cells.experiment.inject.correction = correction;
      const auto result = cells.run();
      CHECK(test::lasting_labels(result.summary) == "injected");
      int compared = 0;
      for (const auto& [place, lists] : chosen_of(result.trace))
        for (std::size_t i = 1; i < lists.size(); ++i, ++compared) {
          CAPTURE(i);
          REQUIRE(lists[i].size() == most);
          // Without corrections the second step still reads what the first one, which has no last query, chose.
          if (i == 1 && correction == 0)
            CHECK(lists[i] == lists[i - 1]);
          else
            CHECK(shared(lists[i], lists[i - 1]) == static_cast<std::size_t>(std::lround(overlap * most)));
        }
      CHECK(compared > 300);
    }
  }
}

TEST_CASE("the injected share of heads is corrected") {
  // Lists that follow each other share no page; lists with one between them share some. So lists tell which heads
  // chose before attention: in each step a head reads list t, and list t + 1 if it was corrected.
  const double correction = .3;
  Speculation cells;
  cells.experiment.inject.overlap = 0;
  cells.experiment.inject.correction = correction;
  int corrected = 0, all = 0;
  for (const auto& [place, lists] : chosen_of(cells.run().trace)) {
    bool before = true;  // in the first step
    for (std::size_t i = 1; i < lists.size(); ++i, ++all) {
      const std::size_t same = shared(lists[i], lists[i - 1]);
      const bool now = before ? same == 0 : same > 0;
      if (before && !now) CHECK(same == most);
      corrected += now;
      before = now;
    }
  }
  REQUIRE(all > 300);
  CHECK(static_cast<double>(corrected) / all ==
        Approx(correction).margin(4 * std::sqrt(correction * (1 - correction) / all)));
  Speculation uncorrected("dense_layers: 0, correction: false");  // the ablation stays without corrections
  uncorrected.experiment.inject.overlap = 0;
  uncorrected.experiment.inject.correction = 1;
  for (const auto& [place, lists] : chosen_of(uncorrected.run().trace))
    for (std::size_t i = 1; i < lists.size(); ++i) CHECK(shared(lists[i], lists[i - 1]) == 0);
}

TEST_CASE("a policy's injected lists are those of any other slot and batch") {
  Speculation cells;
  cells.experiment.inject.overlap = .5;
  cells.experiment.inject.correction = .3;
  cells.experiment.batch = 1;
  const auto alone = cells.run();
  for (const int batch : {2, 4}) {
    cells.experiment.batch = batch;
    const auto other = cells.run();
    CHECK(lists_of(other.trace) == lists_of(alone.trace));
    for (std::size_t i = 0; i < alone.samples.size(); ++i) CHECK(other.samples[i].output == alone.samples[i].output);
  }
  cells.cell.seed = 1;
  CHECK(lists_of(cells.run().trace) != lists_of(alone.trace));
}

TEST_CASE("the injected share of checks finds drift") {
  test::Drifting cells(test::tiny_model("llama-gqa3"));
  const int pivots = test::Drifting::samples * cells.model->config.layers,
            satellites = cells.model->config.kv_heads - 1;
  for (const double drift : {0., .3, 1.}) {
    CAPTURE(drift);
    cells.experiment.inject.drift = drift;
    int count = 0;
    const auto all = cells.fetches(1);
    for (const auto& [place, steps] : all) {
      CHECK(place[2] > 0);
      CHECK(steps == all.at({place[0], place[1], 1}));          // a pivot's satellites fetch together
      for (const int step : steps) CHECK((step + 1) % 2 == 0);  // steps with a check
      count += static_cast<int>(steps.size());
    }
    const int checked = pivots * satellites * test::Drifting::checks;
    if (drift == 0 || drift == 1)
      CHECK(count == static_cast<int>(drift) * checked);
    else
      CHECK(static_cast<double>(count) / checked ==
            Approx(drift).margin(4 * std::sqrt(drift * (1 - drift) / (pivots * test::Drifting::checks))));
  }
}

TEST_CASE("injected drift is that of any other slot and batch") {
  test::Drifting cells(test::tiny_model("llama-gqa3"));
  cells.experiment.inject.drift = .3;
  const auto alone = cells.fetches(1);
  for (const int batch : {2, 4}) CHECK(cells.fetches(batch) == alone);
  cells.cell.seed = 1;
  CHECK(cells.fetches(1) != alone);
}

TEST_CASE("the overlap of a head that chooses every few steps is that of its choices") {
  constexpr std::size_t period = 4;
  Speculation cells;
  cells.experiment.policies = {test::policy_of(
      "{flexicache: {rerank_every: 4, stagger: false, keep_new: false, unstable_heads: false, overlap: false, "
      "budget: {tokens: 40}}}",
      page_size)};
  cells.experiment.inject.overlap = .7;
  const auto result = cells.run();
  CHECK(test::lasting_labels(result.summary) == "injected");
  int compared = 0;
  for (auto& [place, lists] : lists_of(result.trace)) {
    std::vector<Pages> chosen = lists;
    for (std::size_t i = 0; i < lists.size(); ++i) {
      // Attention reads the newest page too, which may or may not be a chosen one.
      CHECK(lists[i].back() == (Speculation::prompt + static_cast<int>(i)) / page_size);
      REQUIRE((lists[i].size() == most || lists[i].size() == most + 1));
      if (lists[i].size() > most) chosen[i].pop_back();
      if (i % period != 0)
        CHECK(chosen[i] == chosen[i - 1]);
      else if (i > 0)
        CHECK((++compared, shared(chosen[i], chosen[i - 1])) == 7);
    }
  }
  CHECK(compared > 50);
}

TEST_CASE("heads that rerank every few steps take one overlap, and those that choose in each step another") {
  constexpr std::size_t period = 4;
  Speculation cells;
  cells.experiment.policies = {test::policy_of(
      "{flexicache: {rerank_every: 4, stagger: false, keep_new: false, budget: {tokens: 40}}}", page_size)};
  // Its hash is recorded; the marks are those below.
  cells.experiment.policies.front().profile = (test::source_root() / "experiments/quality/heads.h5").string();
  cells.experiment.inject.overlap = .9;
  cells.experiment.inject.rerank_overlap = .4;
  const auto marked = [](int layer, int head) { return (layer + head) % 2 == 0; };
  Profile profile;
  ProfileArray& marks = profile["unstable"];
  marks.extent = {cells.model->config.layers, cells.model->config.kv_heads};
  for (int l = 0; l < cells.model->config.layers; ++l)
    for (int h = 0; h < cells.model->config.kv_heads; ++h) marks.values.push_back(marked(l, h));
  CellInput in = cells.input();
  in.profile = std::make_shared<const Profile>(profile);
  const auto result = run_cell(in);
  REQUIRE(result.summary.error == "");
  CHECK(test::lasting_labels(result.summary) == "injected");
  int unstable = 0, stable = 0;
  for (auto& [place, lists] : lists_of(result.trace)) {
    const bool each_step = marked(place[1], place[2]);
    std::vector<Pages> chosen = lists;
    for (std::size_t i = 0; i < lists.size(); ++i) {
      CAPTURE(i, each_step);
      if (lists[i].size() > most) chosen[i].pop_back();  // the newest page, beside the choice
      if (i == 0) continue;
      // A stable head reads what it chose from the next step on. Its first reranking follows the prompt's choice.
      if (each_step)
        CHECK((++unstable, shared(chosen[i], chosen[i - 1])) == 9);
      else if (i % period != 1)
        CHECK(chosen[i] == chosen[i - 1]);
      else
        CHECK((++stable, shared(chosen[i], chosen[i - 1])) == (i == 1 ? 9 : 4));
    }
  }
  CHECK((unstable > 50 && stable > 20));
}

TEST_CASE("a policy follows the lists of a trace, step by step") {
  Speculation quest;
  quest.experiment.policies = {test::policy_of("{quest: {dense_layers: 0, budget: {tokens: 88}}}", page_size)};
  const auto traced = quest.run();
  const auto recorded = lists_of(traced.trace);
  // Each head chooses before attention, so it reads the list of the same step.
  Speculation cells("dense_layers: 0, speculation: false");
  cells.follow(traced);
  const auto result = cells.run();
  CHECK(test::lasting_labels(result.summary) == "injected");
  int compared = 0;
  for (const auto& [place, lists] : chosen_of(result.trace))
    for (std::size_t i = 0; i < lists.size(); ++i, ++compared) {
      Pages candidates = recorded.at(place)[i];
      const int tokens = Speculation::prompt + static_cast<int>(i) + 1;
      std::erase_if(candidates,
                    [&](int page) { return page < pinned / page_size || page >= (tokens - pinned) / page_size; });
      REQUIRE(lists[i].size() == most);
      CHECK(shared(lists[i], candidates) == std::min<std::size_t>(most, candidates.size()));
    }
  CHECK(compared > 300);
  // A head that chooses every 4 steps takes the lists of these steps.
  cells.experiment.policies = {test::policy_of(
      "{flexicache: {rerank_every: 4, stagger: false, keep_new: false, unstable_heads: false, overlap: false, "
      "budget: {tokens: 40}}}",
      page_size)};
  for (const auto& [place, lists] : lists_of(cells.run().trace))
    for (std::size_t i = 0; i < lists.size(); ++i)
      CHECK(shared(lists[i], recorded.at(place)[i / 4 * 4]) >= static_cast<std::size_t>(most));
}

TEST_CASE("a policy that asks for nothing that is injected fails, with the place in the experiment") {
  Speculation cells("dense_layers: 99");
  cells.experiment.inject.where = "exp.yaml:7:9";
  const auto error = [&](std::optional<double> overlap, std::optional<double> correction) {
    cells.experiment.inject.overlap = overlap, cells.experiment.inject.correction = correction;
    const auto out = static_cast<test::CellFixture&>(cells).run();
    CHECK(out.summary.status == "failed");
    return out.summary.error;
  };
  CHECK_THAT(error(.5, {}),
             Catch::StartsWith("exp.yaml:7:9: got inject with policy 'freekv'") && Catch::Contains("ops::score_pages"));
  CHECK_THAT(error({}, .5), Catch::Contains("ops::turned_heads"));
  CHECK_THAT(error(.5, .5), Catch::Contains("called no ops::score_pages and no ops::turned_heads, wanted one"));
  cells.experiment.inject.drift = .5;
  CHECK_THAT(error({}, {}), Catch::Contains("called no ops::drifted_by_logits, wanted one"));
}

TEST_CASE("a policy that asks for a part of what is injected warns of the other keys") {
  const auto warnings = [](test::CellFixture& cells, const std::shared_ptr<const Profile>& profile = {}) {
    CellInput in = cells.input();
    in.profile = profile;
    const auto summary = run_cell(in).summary;
    CHECK(summary.error == "");
    CHECK(summary.labels.find("injected") != std::string::npos);
    return summary.warnings;
  };
  const auto inject = [](test::CellFixture& cells, bool lists, bool turns, bool drift) {
    if (lists) cells.experiment.inject.overlap = .5;
    if (turns) cells.experiment.inject.correction = .5;
    if (drift) cells.experiment.inject.drift = .5;
  };
  Speculation speculation;
  inject(speculation, true, true, false);
  CHECK(warnings(speculation) == "");
  inject(speculation, true, true, true);
  CHECK(warnings(speculation) ==
        "got inject of drift with policy 'freekv', whose decode step called no ops::drifted_by_logits, wanted one that "
        "does: these keys change nothing in it");
  Cells flexible;
  flexible.experiment.policies = {
      test::policy_of("{flexicache: {rerank_every: 4, unstable_heads: false, budget: {tokens: 40}}}", page_size)};
  inject(flexible, true, true, true);
  CHECK_THAT(warnings(flexible), Catch::Contains("got inject of correction and drift with policy 'flexicache'") &&
                                     Catch::Contains("called no ops::turned_heads and no ops::drifted_by_logits"));
  test::Drifting drifting(test::tiny_model("llama-gqa3"));
  inject(drifting, false, false, true);
  CHECK(warnings(drifting, drifting.roles) == "");
  inject(drifting, true, false, true);
  drifting.experiment.inject.rerank_overlap = .5;
  CHECK_THAT(warnings(drifting, drifting.roles),
             Catch::Contains("got inject of overlap and rerank_overlap with policy 'heterocache'"));
  Cells selector;
  inject(selector, true, false, false);
  CHECK(warnings(selector) == "");
  inject(selector, true, true, true);
  CHECK_THAT(warnings(selector), Catch::Contains("got inject of correction and drift with selector 'quest'"));
}

TEST_CASE("lists of a traced cell are injected again, the same ones") {
  for (const int dense : {0, 1}) {
    CAPTURE(dense);
    Cells cells;
    cells.experiment.policies = {
        test::policy_of("{quest: {dense_layers: " + std::to_string(dense) + ", budget: {tokens: 40}}}", page_size)};
    const auto own = cells.run();
    cells.follow(own);
    CHECK(cells.recorded->questions.size() == 4);
    CHECK(cells.recorded->layers.size() == static_cast<std::size_t>(cells.model->config.layers - dense));
    CHECK(cells.recorded->layers.front() == dense);
    CHECK(cells.recorded->heads == cells.model->config.kv_heads);
    CHECK(cells.recorded->pages == cells.room());
    const auto again = cells.run();
    CHECK(test::lasting_labels(again.summary) == "injected");
    CHECK(lists_of(again.trace) == lists_of(own.trace));
  }
}

TEST_CASE("several questions of a sample and turns follow their own lists") {
  for (const bool shared : {false, true}) {  // true: the questions share the context's cache; false: each has a prompt
    CAPTURE(shared);
    Talks talks(shared);
    const auto own = talks.run();
    const auto wanted = lists_of(own.trace);
    talks.follow(own);
    for (const int batch : {1, 2, 3, 8}) {
      CAPTURE(batch);
      talks.experiment.batch = batch;
      const auto again = talks.run();
      CHECK(lists_of(again.trace) == wanted);
      for (std::size_t i = 0; i < own.samples.size(); ++i) CHECK(again.samples[i].output == own.samples[i].output);
    }
    // For other texts of the same lengths the selector itself would read other pages.
    talks.retell();
    CHECK(lists_of(talks.run().trace) == wanted);
    talks.experiment.inject.trace.clear();
    for (const auto& [place, lists] : lists_of(talks.run().trace)) CHECK(wanted.at(place) != lists);
  }
}

TEST_CASE("longer answers start a question's lists again and leave those of the next turn alone") {
  Talks talks(true);
  const auto own = talks.run();
  const auto recorded = lists_of(own.trace);
  talks.follow(own);
  auto geometry = std::make_shared<RecordedTrace>(*talks.recorded);
  talks.items.items[0].max_new *= 3;
  talks.place_turns();
  geometry->pages = talks.room();  // recorded pages do not scale with the room
  talks.recorded = geometry;
  const auto again = lists_of(talks.run().trace);
  for (const auto& [place, lists] : recorded) {
    const auto& now = again.at(place);
    REQUIRE(now.size() >= lists.size());
    CHECK((now.size() > lists.size()) == (place[0] == 0));
    for (std::size_t i = 0; i < now.size(); ++i) {
      // The newest page is always read, so it may replace one recorded page.
      const Pages& old = lists[i % lists.size()];
      CHECK(shared(now[i], old) + 1 >= old.size());
    }
  }
}

TEST_CASE("questions and turns that were not recorded are refused") {
  Talks talks(true);
  const auto own = talks.run();
  talks.follow(own);
  auto& items = talks.items.items;
  const auto refused = [&] {
    try {
      talks.run();
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  const auto all = items;
  CHECK(refused().empty());
  items.push_back(items.back());
  items.back().question = 7, items.back().follows = false;
  CHECK_THAT(refused(), Catch::Contains("got question 7 of sample 1") && Catch::Contains("has 3"));
  items = all;
  items[1].follows = false;
  CHECK_THAT(refused(), Catch::Contains("got question 1 of sample 0") && Catch::Contains("there it is a turn"));
  items = all;
  for (Item& item : items) item.sample += 2;  // samples are numbered from the first again
  CHECK(refused().empty());
  items = all;
  std::swap(items[2], items[5]);  // the same questions in another order
  CHECK(follow(*talks.recorded, items) == std::vector<std::int32_t>{0, 1, 5, 3, 4, 2});
}

TEST_CASE("a fidelity pass asks its questions as the plain pass does") {
  // The question of each step of the pass.
  class Listener final : public Policy {
   public:
    Needs needs() const override { return {}; }
    void select(const LayerStep& step, Edits&, Stream) override {
      if (step.layer == 0) asked.push_back(step.question[step.slots[0]]);
    }
    std::vector<std::uint32_t> asked;
  };
  const auto model = test::tiny_model("llama-gqa3");
  auto listener = std::make_shared<Listener>();
  EngineOptions o;
  o.max_tokens = 64;
  Engine engine(model, listener, o);
  Sequence sequence(engine);
  Item item;
  item.prompt = test::test_text(9, model->config.vocab, 1);
  item.fed = {1, 2, 3, 4, 5};
  const Sequence::Asked asked[] = {{0, 4}, {2, 5}, {5, 6}};
  sequence.begin(item, asked);
  sequence.feed(3);
  sequence.close();
  sequence.begin(item);
  sequence.close();
  CHECK(listener->asked == std::vector<std::uint32_t>{4, 4, 5, 5, 5, 6, 0, 0, 0, 0, 0});
}

TEST_CASE("requests follow their own lists, preempted or not") {
  Cells cells;
  for (Item& item : cells.items.items) item.max_new = 40;
  const auto own = cells.run();
  cells.follow(own);
  cells.experiment.policies = {test::policy_of("{quest: {dense_layers: 0, budget: {tokens: 20}}}", page_size)};
  cells.experiment.metrics = {Metric::score};
  const auto alone = cells.run();
  cells.experiment.inject.trace.clear();
  const auto weak = cells.run();
  cells.experiment.inject.trace = "recorded";
  cells.experiment.workloads.resize(1);
  cells.experiment.workloads[0].requests = 9;
  cells.experiment.batch = 4;
  for (const std::int64_t for_pages : {0, 300'000}) {
    if (for_pages > 0) cells.leave_for_pages(for_pages, 4);
    const auto served = cells.run();
    CHECK((served.summary.preemptions > 0) == (for_pages > 0));
    REQUIRE(served.samples.size() == 9);
    int others = 0;
    for (std::size_t i = 0; i < 9; ++i) {
      CHECK(served.samples[i].output == alone.samples[i % 4].output);
      others += alone.samples[i % 4].output != weak.samples[i % 4].output;
    }
    CHECK(others > 0);
  }
}

TEST_CASE("a traced file says which layers and pages its lists are of") {
  Cells cells;
  auto cell = cells.run();
  // Like the trace of a policy with a dense first layer, from an engine with more room.
  std::erase_if(cell.trace.events, [](const auto& e) { return e.layer == 0; });
  cell.trace.pages = 999;
  cells.follow(cell);
  CHECK(cells.recorded->layers.front() == 1);
  CHECK(cells.recorded->pages == 999);
  // A file without these values: each sample is one of the task's, and the greatest listed page gives the room.
  for (auto& row : cell.samples) row.task_sample = row.question = row.follows = -1;
  cell.trace.pages = 0;
  std::erase_if(cell.trace.events, [](const auto& e) { return e.sample == 2; });
  cells.follow(cell);
  REQUIRE(cells.recorded->questions.size() == 4);
  CHECK(cells.recorded->questions[3].sample == 3);
  CHECK(cells.recorded->questions[3].steps == cells.recorded->questions[0].steps);
  CHECK(cells.recorded->questions[2].steps == 0);
  CHECK(cells.recorded->pages <= cells.room());
  cell.trace.events.front().sample = -1;
  CHECK_THROWS_AS(cells.follow(cell), Error);
}

TEST_CASE("a trace of another shape or page size is followed with a warning, before the run") {
  const std::string file = temporary("kvlab-of-another-shape");
  const Removed removed{file};
  Cells cells;
  cells.cell.params = R"({"quest": {}, "page_size": 4})";
  write(file, cells.run());
  const RecordedTrace recorded = read_recorded(file, "");
  const ModelConfig& config = cells.model->config;
  CHECK(recorded.model_layers == config.layers);
  CHECK(recorded.page_size == page_size);
  ModelConfig larger = config;
  larger.layers = 40, larger.kv_heads = 10;
  CHECK(other_shape(recorded, config, page_size) == "");
  CHECK(other_shape(recorded, larger, 16) ==
        "got a trace of " + std::to_string(config.layers) + " layers, " + std::to_string(config.kv_heads) +
            " KV heads, pages of 4 tokens with inject, wanted the run's 40 layers, 10 KV heads, pages of 16 tokens: "
            "layers and KV heads follow recorded ones by their number, modulo the recorded count, and page numbers are "
            "scaled");
  RecordedTrace untold = recorded;  // of an earlier file
  untold.model_layers = untold.page_size = 0;
  larger.kv_heads = config.kv_heads;
  CHECK(other_shape(untold, larger, 16) == "");

  const auto warnings = [&](const std::string& policy, int pages_of) {
    const std::string text = "experiment: e\nmodel: {path: " + test::golden("tiny/llama-gqa3").string() +
                             ", dtype: f32}\ntasks:\n  - text: {prefix: 60, forced: 4, samples: 1}\npolicies:\n  - " +
                             policy + "\npage_size: " + std::to_string(pages_of) + "\ninject: {trace: " + file +
                             "}\noutput: " + file + ".none\n";
    const log::Collected all;
    static_cast<void>(
        prepare(read_experiment(yaml::parse_text(text, "exp.yaml"), test::built_catalog()), test::built_catalog()));
    return all.warnings();
  };
  const std::string quest = "quest: {dense_layers: 0, budget: {tokens: 40}}";
  CHECK(warnings(quest, 4).empty());
  // A scorer follows no lists.
  CHECK(warnings(quest + "\n  - snapkv: {window: 8, page_size: 8, budget: {tokens: 40}}", 4).empty());
  REQUIRE(warnings(quest, 8).size() == 1);
  CHECK_THAT(warnings(quest, 8).front(), Catch::StartsWith("exp.yaml:") &&
                                             Catch::Contains("got a trace of pages of 4 tokens with inject, wanted the "
                                                             "run's pages of 8 tokens"));
}

TEST_CASE("a file without lists of pages is refused") {
  Cells cells;
  cells.experiment.metrics = {Metric::score};
  const std::string file = temporary("kvlab-untraced");
  write(file, cells.run());
  const auto message = [&](const char* cell) {
    try {
      read_recorded(file, cell);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  CHECK_THAT(message(""), Catch::Contains("got no trace") && Catch::Contains("metrics: [trace]"));
  CHECK_THAT(message("other"), Catch::Contains("'other'"));
  cells.experiment.metrics = {Metric::trace};
  auto cell = cells.run();
  results::write_part(file, cell, {});
  cell.id = cell.summary.cell = "more";
  results::write_part(file, cell, {});
  results::rebuild(file, {}, {"cell", "more"});
  CHECK_THAT(message(""), Catch::Contains("several cells") && Catch::Contains("cell, more"));
  CHECK(read_recorded(file, "more").questions.size() == 4);
  remove(file);
  CHECK_THAT(message(""), Catch::Contains("no such file"));
}
