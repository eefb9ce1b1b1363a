// Tasks measure the use of the context. On the bundled recall model each task scores higher with the full cache than
// with a window far below the context. experiments/tasks.yaml gives more numbers.
#include <algorithm>
#include <catch2/catch.hpp>
#include <fstream>
#include <map>

#include "experiment/experiment.hpp"
#include "result/results.hpp"
#include "run/runner.hpp"
#include "test/model/tiny_files.hpp"

using namespace kvlab;

TEST_CASE("every generated task scores higher with the full cache than with a window") {
  const test::TempDir folder;
  Registry registry;
  const RegistryCatalog catalog{registry};
  const std::string out = (folder / "r.h5").string();
  std::string tasks;
  std::size_t count = 0;
  for (const PluginInfo* p : registry.list(Role::task)) {
    const auto has = [&](const char* name) {
      return std::any_of(p->params.begin(), p->params.end(), [&](const ParamSpec& s) { return s.name == name; });
    };
    if (!has("context")) continue;
    // frequent_words needs more samples: a window also sees which coded words are frequent, but less surely.
    tasks += "  - " + p->name + ": {context: 1024, samples: " + (p->name == "frequent_words" ? "4" : "1") +
             (has("depth") ? ", depth: 3}\n" : "}\n");
    ++count;
  }
  REQUIRE(count >= 14);
  std::ofstream(folder / "e.yaml")
      << "experiment: tasks\nthreads: 1\nmodel: {path: bundled/recall, dtype: bf16}\ntasks:\n"
      << tasks << "policies: [full, window: {budget: {tokens: 128}}]\n"
      << "metrics: [score]\noutput: " << out << "\n";
  REQUIRE(run_experiment(load_experiment(folder / "e.yaml", {}, catalog), catalog, {"test", false, true}) == 0);
  std::map<std::string, std::map<std::string, double>> scores;
  for (const results::SummaryRow& row : results::read_summary(out).rows) scores[row.task][row.policy] = row.score;
  CHECK(scores.size() == count);
  for (auto& [task, by] : scores) {
    CAPTURE(task, by["full"], by["window"]);
    CHECK(by["full"] > by["window"]);
  }
}
