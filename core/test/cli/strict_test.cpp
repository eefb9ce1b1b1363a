// --strict: a cell that other programs disturbed runs again.
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <catch2/catch.hpp>

#include "base/cpu_use.hpp"
#include "result/results.hpp"
#include "support/child.hpp"

using namespace kvlab;
using Catch::Contains;
using test::Ended;

namespace {

const char* experiment =
    "model: {path: bundled/recall}\n"
    "tasks: [niah: {context: 128, samples: 1, max_new_tokens: 8}]\n"
    "policies: [full]\nmetrics: [score, latency]\nbackend: cpu\nthreads: 1\n";

void use_first_cpu() {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(static_cast<std::size_t>(allowed_cpus().front()), &one);
  sched_setaffinity(0, sizeof one, &one);
}

// A process that keeps the first CPU busy while this object lives.
class Busy {
 public:
  Busy() : child_(fork()) {
    if (child_ != 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    use_first_cpu();
    for (volatile unsigned i = 0;;) i = i + 1;
  }
  ~Busy() {
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
  }
  Busy(const Busy&) = delete;

 private:
  pid_t child_;
};

Ended run(const test::Folder& folder, const std::vector<std::string>& more) {
  std::vector<std::string> words{"run", folder.write("e.yaml", experiment), "-o", folder / "out.h5"};
  words.insert(words.end(), more.begin(), more.end());
  return test::run_kvlab(words, use_first_cpu);
}

results::SummaryRow row(const test::Folder& folder) {
  const auto rows = results::read_summary(folder / "out.h5").rows;
  REQUIRE(rows.size() == 1);
  return rows.front();
}

}  // namespace

TEST_CASE("--strict: a disturbed cell runs again, also one that a run without it finished, and three times at most") {
  const Busy busy;
  const test::Folder folder;
  const Ended plain = run(folder, {});
  INFO(plain.said);
  REQUIRE(plain.code == 0);
  CHECK(row(folder).reruns == -1);
  REQUIRE(results::has_label(row(folder), "disturbed"));

  const Ended strict = run(folder, {"--strict"});
  INFO(strict.said);
  CHECK(strict.code == 0);
  CHECK_THAT(strict.said, Contains("it runs again (3 of at most 3 times)") &&
                              Contains("ok, run again 3 times, and still disturbed") &&
                              Contains("warning: 1 cell was disturbed in each of 4 runs"));
  CHECK(row(folder).reruns == 3);
  CHECK(results::has_label(row(folder), "disturbed"));

  const Ended again = run(folder, {"--strict"});
  CHECK(again.code == 0);
  CHECK_THAT(again.said, Contains("1 of 1 cells were finished already") && !Contains("runs again"));
}

TEST_CASE("--strict travels to workers and to the processes of --isolate") {
  const Busy busy;
  const auto how = GENERATE(std::vector<std::string>{"--jobs", "1"}, std::vector<std::string>{"--isolate"});
  const test::Folder folder;
  std::vector<std::string> words{"--strict"};
  words.insert(words.end(), how.begin(), how.end());
  const Ended ended = run(folder, words);
  INFO(ended.said);
  CHECK(ended.code == 0);
  CHECK(row(folder).reruns == 3);
  CHECK_THAT(ended.said, Contains("ok, run again 3 times, and still disturbed"));
}
