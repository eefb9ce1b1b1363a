// The commands `record` and `replay` as a user runs them.
#include <catch2/catch.hpp>

#include "base/regular_file.hpp"
#include "result/results.hpp"
#include "support/child.hpp"

using namespace kvlab;
using test::Ended;

TEST_CASE("record says its size, replay runs policies of a file without a model, by workers too") {
  const test::Folder folder;
  const std::string recording = folder / "r.h5", out = folder / "out.h5";
  const std::string model = (test::source_root() / "core/test/golden/tiny/llama-gqa3").string();
  const std::string experiment =
      folder.write("e.yaml", "model: {path: " + model +
                                 ", dtype: f32}\ntasks: [text: {prefix: 64, forced: 8, samples: 2}]\n"
                                 "policies: [full]\n");
  const std::string policies =
      folder.write("p.yaml", "policies:\n  - full\n  - window: {budget: {tokens: [16, 32]}}\n");
  const Ended recorded = test::run_kvlab({"record", experiment, "-o", recording, "--samples", "1"});
  REQUIRE(recorded.code == 0);
  CHECK_THAT(recorded.said, Catch::Contains("1 question of the full cache: at most ") && Catch::Contains(" MB in ") &&
                                Catch::Contains("recording: " + recording));
  const Ended replayed = test::run_kvlab({"replay", recording, policies, "-o", out, "--jobs", "2"});
  CAPTURE(replayed.said);
  REQUIRE(replayed.code == 0);
  CHECK_THAT(replayed.said, Catch::Contains("page recall") && Catch::Contains("replayed: a recording gave"));
  CHECK(results::read_summary(out).rows.size() == 3);

  for (const std::vector<std::string>& words : {std::vector<std::string>{"report", recording},
                                                {"report", recording, "--plugins"},
                                                {"report", recording, "--attempts"},
                                                {"report", recording, "--memory"},
                                                {"report", recording, "--array", "x"},
                                                {"report", out, recording},
                                                {"report", recording, "--html", folder / "page"},
                                                {"verify", recording}}) {
    const Ended read = test::run_kvlab(words);
    CAPTURE(words, read.said);
    CHECK(read.code == 2);
    CHECK_THAT(read.said, Catch::Contains(recording + ": got a recording, wanted a result; `kvlab replay` reads it"));
  }

  CHECK(test::run_kvlab({"replay", experiment}).code == 2);
  const std::string run = folder / "run.h5";
  REQUIRE(test::run_kvlab({"run", experiment, "-o", run}).code == 0);
  const std::string before = read_file(run);
  const Ended onto = test::run_kvlab({"replay", recording, policies, "-o", run});
  CHECK(onto.code == 2);
  CHECK_THAT(onto.said,
             Catch::Contains(run + ": got the result of a run as the output of a replay, wanted a new name"));
  CHECK(read_file(run) == before);
  CHECK(test::run_kvlab({"replay", recording, policies, "-o", out}).code == 0);  // its own
  const Ended over = test::run_kvlab({"run", experiment, "-o", recording});
  CHECK(over.code == 2);
  CHECK_THAT(over.said, Catch::Contains("got a recording as the output of a run"));
  const Ended verified = test::run_kvlab({"verify", out});
  CHECK(verified.code == 2);
  CHECK_THAT(verified.said, Catch::Contains("got the result of a replay"));
}
