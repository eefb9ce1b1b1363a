// `kvlab report --choose`: one setting of a policy, over all tasks.
#include "result/choice.hpp"

#include <fmt/format.h>

#include <catch2/catch.hpp>

#include "result/results_sample.hpp"

using namespace kvlab;
using namespace kvlab::results;
using Catch::Contains;

namespace {

std::string thresholds(int high, double low) {
  return fmt::format(R"({{"policy": {{"leankv": {{"high_from": {}, "low_from": {}}}}}}})", high, low);
}

// Cells of a file, each of four answers.
class File {
 public:
  File& add(const std::string& task, const std::string& params, double score, double compression,
            const std::string& status = "ok", const std::string& policy = "leankv", const std::string& labels = "") {
    CellResult c;
    c.id = c.summary.cell = "c" + std::to_string(++count_);
    c.summary.model = "m", c.summary.task = task, c.summary.policy = policy, c.summary.params = params;
    c.summary.status = status, c.summary.labels = labels;
    if (status == "ok") c.summary.score = score, c.summary.compression = compression;
    write_part(path_, c, sample_info());
    return *this;
  }
  std::string text(double lose = 0, const std::string& policy = "leankv") const {
    ReportOptions options;
    options.choose = policy, options.lose = lose;
    return report({path_}, options);
  }

 private:
  int count_ = 0;
  TemporaryFolder dir_;
  std::string path_ = dir_ / "o.h5";
};

}  // namespace

TEST_CASE("a choice takes the best mean over the tasks, and of equals the fewest bytes") {
  File file;
  file.add("a", thresholds(1, 0), 0.9, 2).add("b", thresholds(1, 0), 0.5, 2);        // 0.7
  file.add("a", thresholds(3, 0), 0.7, 3).add("b", thresholds(3, 0), 0.7, 3);        // 0.7, in fewer bytes
  file.add("a", thresholds(3, 0.02), 0.8, 5).add("b", thresholds(3, 0.02), 0.5, 5);  // 0.65
  file.add("a", "{}", 1, 0.9, "ok", "full").add("b", "{}", 1, 0.9, "ok", "full");
  CHECK_THAT(file.text(), Contains("--set leankv.high_from=3 --set leankv.low_from=0\n"));
  CHECK_THAT(file.text(0.04), Contains("--set leankv.high_from=3 --set leankv.low_from=0\n"));
  CHECK_THAT(file.text(0.05), Contains("--set leankv.high_from=3 --set leankv.low_from=0.02\n"));
}

TEST_CASE("a choice considers no setting that lacks a task") {
  File file;
  file.add("a", thresholds(1, 0), 0.2, 2).add("b", thresholds(1, 0), 0.2, 2);
  file.add("a", thresholds(3, 0), 0.9, 3).add("b", thresholds(3, 0), 0.9, 3, "failed");
  file.add("a", thresholds(5, 0), 0.9, 3);
  const std::string text = file.text();
  CHECK_THAT(text, Contains("--set leankv.high_from=1"));
  CHECK_THAT(text, Contains("high_from=3 was not considered: failed"));
  CHECK_THAT(text, Contains("high_from=5 was not considered: it has no row"));
}

TEST_CASE("a choice considers no setting whose bytes were not measured") {
  File file;
  file.add("a", thresholds(1, 0), 0.9, not_measured).add("a", thresholds(2, 0), 0.7, 2);
  CHECK_THAT(file.text(0.5),
             Contains("--set leankv.high_from=2") && Contains("high_from=1 was not considered: no bytes"));
}

TEST_CASE("a choice is not of ablations, and says which of equal rows counts") {
  File file;
  file.add("b", thresholds(1, 0), 0.1, 1, "ok", "leankv -per_head_dynamics");
  file.add("a", thresholds(1, 0), 0.2, 2).add("a", thresholds(2, 0), 0.3, 2);
  CHECK_THAT(file.text(), Contains("--set leankv.high_from=2"));
  file.add("a", thresholds(1, 0), 0.9, 2, "ok", "leankv", "eager");
  CHECK_THAT(file.text(), Contains("--set leankv.high_from=2") && Contains("several rows of equal parameters"));
}

TEST_CASE("a choice names what it lacks") {
  File file;
  file.add("a", thresholds(1, 0), 0.2, 2);
  CHECK_THAT(file.text(), Contains("one setting alone"));
  CHECK_THROWS_WITH(file.text(0, "leankw"), Contains("got 'leankw'") && Contains("leankv"));
  File random;
  random.add("a", thresholds(1, 0), 0.2, 2, "ok", "leankv", "synthetic")
      .add("a", thresholds(2, 0), 0.2, 2, "ok", "leankv", "synthetic");
  CHECK_THAT(random.text(), Contains("random weights") && !Contains("--set"));
}
