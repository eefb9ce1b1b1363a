// Injected page lists, found again in the trace of the cell that was run with them.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <cmath>
#include <filesystem>
#include <map>

#include "run/cell.hpp"
#include "run/recorded.hpp"
#include "support/cell_fixture.hpp"

using namespace kvlab;

namespace {

using Pages = std::vector<std::int32_t>;

constexpr int page_size = 4, most = 10;  // tokens of a page, pages of a list

// Prompts of the tiny model under quest, four sequences of which two are batched.
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
};

// By sample, layer and head: the lists of its steps.
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

}  // namespace

TEST_CASE("the overlap of traced lists is the injected one") {
  for (const double overlap : {0., 0.5, 0.83, 1.}) {
    CAPTURE(overlap);
    Cells cells;
    cells.experiment.inject.overlap = overlap;
    const auto result = cells.run();
    CHECK(result.summary.labels == "injected");
    int compared = 0;
    for (const auto& [place, lists] : lists_of(result.trace))
      for (std::size_t i = 1; i < lists.size(); ++i, ++compared) {
        REQUIRE(lists[i].size() == most);
        CHECK(std::adjacent_find(lists[i].begin(), lists[i].end(), std::greater_equal<>()) == lists[i].end());
        const auto wanted = static_cast<std::size_t>(std::lround(overlap * most));
        // The newest page is always read: once it is another one, it takes the place of a shared page, and where none
        // is wanted the same one is shared.
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
    CHECK(sum / steps == Approx(overlap).margin(1e-9));  // of ten pages both are whole numbers
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
  // The items the other way round: each one keeps the number of its sample.
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
  CHECK(own.summary.labels.empty());
  cells.experiment.inject.overlap = 0.5;
  CHECK(lists_of(cells.run().trace) != lists_of(own.trace));
  cells.experiment.policies = {test::full_spec()};
  CHECK(cells.run().summary.labels.empty());
}

TEST_CASE("lists of a traced cell are injected again") {
  Cells cells;
  const auto own = cells.run();
  const std::string file = temporary("kvlab-recorded");
  write(file, own);
  cells.recorded = std::make_shared<RecordedTrace>(read_recorded(file, ""));
  remove(file);
  CHECK(cells.recorded->samples == 4);
  CHECK(cells.recorded->layers == cells.model->config.layers);
  CHECK(cells.recorded->heads == cells.model->config.kv_heads);
  cells.experiment.inject.trace = file;
  const auto again = cells.run();
  CHECK(again.summary.labels == "injected");
  const auto scale = [&](std::int32_t page) {
    const int room = (cells.items.items[3].most_tokens() + page_size - 1) / page_size;  // of the longest one
    return page * room / cells.recorded->pages;
  };
  auto recorded = lists_of(own.trace);
  int pages = 0, shared = 0;
  for (const auto& [place, lists] : lists_of(again.trace))
    for (std::size_t i = 0; i < lists.size(); ++i)
      for (const std::int32_t page : recorded[place].at(i)) {
        ++pages;
        shared += std::binary_search(lists[i].begin(), lists[i].end(), scale(page));
      }
  CHECK(pages > 100);
  CHECK(shared > 0.85 * pages);  // all but pages that meet, and the newest one
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
  CHECK(read_recorded(file, "more").samples == 4);
  remove(file);
  CHECK_THAT(message(""), Catch::Contains("no such file"));
}
