#include "papers/paper.hpp"

#include <catch2/catch.hpp>
#include <cmath>

#include "experiment/reader.hpp"
#include "support/child.hpp"

using namespace kvlab;
using namespace kvlab::papers;
using Catch::Contains;
using test::Folder;

namespace {

const std::string head = "title: A paper\nsource: a journal\nsetting: {model: big, gpu: one}\nitems:\n";

Paper read(const std::string& items) {
  const Folder folder;
  return read_paper(folder.write("known.yaml", head + items));
}

std::vector<std::string> errors_of(const std::string& items) {
  try {
    read(items);
  } catch (const ExperimentError& e) {
    std::vector<std::string> out;
    for (const Error& one : e.errors()) out.emplace_back(one.what());
    return out;
  }
  return {};
}

}  // namespace

TEST_CASE("a value belongs to what its row, its column and its table say, the row first") {
  const Paper paper = read(
      "  table1:\n"
      "    title: Scores\n"
      "    kind: quality\n"
      "    setting: {gpu: two, budget: 64}\n"
      "    run: [a.yaml]\n"
      "    values:\n"
      "      read: score\n"
      "      as: percent\n"
      "      policy: table\n"
      "      columns: {one: {task: t1, policy: column}, two: {over: tasks}, three: null}\n"
      "      rows:\n"
      "        r1: {policy: row, values: [1.5, null, {value: 3, policy: own, budget: 7}]}\n"
      "        r2: {missing: not built, values: [1, 2, 3]}\n");
  CHECK(paper.name == "known");
  REQUIRE(paper.items.size() == 1);
  const Item& item = paper.items[0];
  using Setting = std::vector<std::pair<std::string, std::string>>;
  CHECK(item.setting == Setting{{"model", "big"}, {"gpu", "two"}, {"budget", "64"}});
  CHECK(item.columns == std::vector<std::string>{"one", "two", "three"});
  REQUIRE(item.rows.size() == 2);
  const auto& values = item.rows[0].values;
  REQUIRE(values.size() == 3);
  CHECK(values[0].value == 1.5);
  CHECK(values[0].reading.policy == "row");
  CHECK(values[0].reading.task == "t1");
  CHECK(values[0].reading.as == "percent");
  CHECK(std::isnan(values[1].value));
  CHECK(values[1].reading.over_tasks);
  CHECK(values[2].value == 3);
  CHECK(values[2].reading.policy == "own");
  CHECK(values[2].reading.budget == 7.);
  CHECK(item.rows[1].missing == "not built");
  CHECK(item.rows[1].values[0].reading.policy == "column");
  CHECK(item.rows[1].values[1].reading.policy == "table");
}

TEST_CASE("a mean is over all tasks, over some, or over the means of groups") {
  const std::string begin = "  table1:\n    title: Scores\n    run: [a.yaml]\n    values:\n      over: ";
  const std::string end =
      "\n      columns: {one: null, two: {over: tasks}}\n      rows: {r1: {policy: p, values: [1, 2]}}\n";
  const auto groups = [&](const std::string& over) {
    const auto values = read(begin + over + end).items.at(0).rows.at(0).values;
    CHECK(values[0].reading.over_tasks);
    CHECK(values[1].reading.over_tasks);
    CHECK(values[1].reading.groups.empty());
    return values[0].reading.groups;
  };
  using Groups = std::vector<std::vector<std::string>>;
  CHECK(groups("tasks").empty());
  CHECK(groups("[a, b]") == Groups{{"a", "b"}});
  CHECK(groups("[[a, b], [c]]") == Groups{{"a", "b"}, {"c"}});
  for (const std::string over : {"[]", "[[a], []]", "task", "[a, [b]]"}) {
    CAPTURE(over);
    const auto all = errors_of(begin + over + end);
    REQUIRE_FALSE(all.empty());
    CHECK_THAT(all[0], Contains("known.yaml:9:"));
  }
}

TEST_CASE("a file of published values that is wrong says where") {
  const auto all = errors_of(
      "  table1:\n"
      "    title: Scores\n"
      "    kind: qualty\n"
      "    values:\n"
      "      reed: score\n"
      "      columns: {one: {task: t}}\n"
      "      rows:\n"
      "        r1: {policy: a, values: [1, 2]}\n"
      "        r2: {policy: a, values: [x]}\n");
  REQUIRE(all.size() == 5);
  CHECK_THAT(all[0], Contains("known.yaml:7:") && Contains("qualty") && Contains("did you mean 'quality'"));
  CHECK_THAT(all[1], Contains("neither 'run' nor 'why_not'"));
  CHECK_THAT(all[2], Contains("known.yaml:9:") && Contains("'reed'") && Contains("did you mean 'read'"));
  CHECK_THAT(all[3], Contains("known.yaml:12:") && Contains("got 2 values, wanted 1, one per column"));
  CHECK_THAT(all[4], Contains("known.yaml:13:") && Contains("x"));
}

TEST_CASE("heads of two profiles are named with their set") {
  const auto all = errors_of(
      "  table1:\n"
      "    title: Heads\n"
      "    run: [a.yaml]\n"
      "    values: {read: shared_heads, columns: {one: {pair: [a, b]}}, rows: {r1: {values: [1]}}}\n");
  REQUIRE(all.size() == 1);
  CHECK_THAT(all[0], Contains("'pair' and 'array'"));
}

TEST_CASE("a folder without papers is an error") {
  const Folder folder;
  CHECK_THROWS_WITH(read_papers(folder / "nothing"), Contains("got no file of published values"));
}

TEST_CASE("every file of this tree reads, and names experiments that are there") {
  const std::filesystem::path root = test::source_root();
  for (const Paper& paper : read_papers(root / "analysis/papers")) {
    CHECK_FALSE(paper.items.empty());
    for (const Item& item : paper.items)
      for (const auto* files : {&item.run, &item.small})
        for (const std::string& file : *files) {
          CAPTURE(paper.name, item.name, file);
          CHECK(std::filesystem::exists(root / file));
        }
  }
}
