// A run under `ulimit -v` writes its cell, or it ends with an error that names memory before the cell starts.
#include <sys/resource.h>

#include <catch2/catch.hpp>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <map>

#include "result/results.hpp"
#include "support/child.hpp"

using namespace kvlab;
using test::Ended;
using test::Folder;

namespace {

const char* tiny =
    "model: {path: bundled/recall}\n"
    "tasks: [niah: {context: 256, max_new_tokens: 8}]\n"
    "policies: [full]\nmetrics: [score, memory]\nbackend: cpu\nthreads: 1\n";

std::function<void()> address_space(rlim_t bytes) {
  return [=] {
    const rlimit limit{bytes, bytes};
    if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(125);
  };
}

// The least limit under which kvlab's own code runs. Below it the dynamic loader (127) or a library's start fails.
rlim_t least_to_start() {
  constexpr rlim_t step = rlim_t{1} << 19;
  for (rlim_t bytes = rlim_t{8} << 20;; bytes += step) {
    const Ended ended = test::run_kvlab({"--version"}, address_space(bytes));
    if (ended.code == 2 || ended.code == 0) return bytes;
    REQUIRE(bytes < rlim_t{1} << 30);
  }
}

// Expects one written cell, or none and an error that names memory.
void check_end(const Folder& folder, const Ended& ended) {
  INFO(ended.said);
  REQUIRE(ended.signal == 0);
  CHECK(folder.files("", ".tmp") + folder.files("out.h5.parts", ".tmp") == 0);
  if (ended.code == 2) {
    CHECK_THAT(ended.said,
               Catch::Contains("error: ") && (Catch::Contains("memory") || Catch::Contains("could not be loaded")));
    CHECK(!std::filesystem::exists(folder / "out.h5"));
    return;
  }
  REQUIRE((ended.code == 0 || ended.code == 1));
  const auto rows = results::read_summary(folder / "out.h5").rows;
  REQUIRE(rows.size() == 1);
  CHECK(rows[0].status == (ended.code == 0 ? "ok" : "oom"));
}

}  // namespace

TEST_CASE("under a limit of memory every run ends as a result, or with 2 before its first cell") {
  const rlim_t least = least_to_start();
  std::map<int, int> ends;
  for (const int mib : {0, 2, 8, 15, 18, 21, 25, 30, 40, 50, 57, 64, 80, 300}) {
    CAPTURE(mib, least);
    const Folder folder;
    const std::string file = folder.write("e.yaml", tiny);
    const Ended ended = test::run_kvlab({"run", file, "-q", "-o", folder / "out.h5"},
                                        address_space(least + (static_cast<rlim_t>(mib) << 20)));
    check_end(folder, ended);
    ++ends[ended.code];
  }
  CHECK(ends[0] > 0);  // the sweep meets each kind of end
  CHECK(ends[1] > 0);
  CHECK(ends[2] > 0);
}

TEST_CASE("kvlab run with a host_memory that is too small says so before its first cell, or in the cell's result") {
  const Folder folder;
  const std::string tiers =
      "model: {synthetic: tiny}\n"
      "tasks: [random_prompts: {prompt: 90, answer: 4, samples: 1}]\n"
      "metrics: [score]\nbackend: cpu\nthreads: 1\npage_size: 8\nspill: always\n"
      "policies:\n"
      "  - full\n"
      "  - freekv: {sinks: 8, window: 8, budget: {tokens: 32}}\n"
      "host_memory: ";
  const std::string out = folder / "out.h5";
  for (const char* command : {"check", "run"}) {
    std::vector<std::string> words{command, folder.write("e.yaml", tiers + "100\n")};
    if (std::string(command) == "run") words.insert(words.end(), {"-o", out});
    const Ended ended = test::run_kvlab(words);
    INFO(ended.said);
    CHECK(ended.code == 2);
    CHECK_THAT(ended.said, Catch::Contains("e.yaml:10:") && Catch::Contains("got host_memory of 100 bytes") &&
                               Catch::Contains("wanted at least "));
    CHECK(!std::filesystem::exists(out));
  }
  const auto run = [&](const char* bytes, int code) {
    const Ended ended = test::run_kvlab({"run", folder.write("e.yaml", tiers + bytes), "-o", out});
    INFO(ended.said);
    CHECK(ended.code == code);
    std::map<std::string, results::SummaryRow> rows;
    for (const auto& row : results::read_summary(out).rows) rows[row.policy] = row;
    REQUIRE(rows.size() == 2);
    CHECK(rows["full"].status == "ok");
    return rows["freekv"];
  };
  const results::SummaryRow small = run("5KB\n", 1);
  CHECK(small.status == "oom");
  CHECK_THAT(small.error, Catch::Contains("where host_memory allows 5000"));
  CHECK(run("20MB\n", 0).status == "ok");
}
