#include "run/disturbance.hpp"

#include <omp.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cmath>

#include "base/clock_rates.hpp"
#include "support/cell_fixture.hpp"

using namespace kvlab;

namespace {

Disturbance quiet() {
  Disturbance d;
  d.seconds = 10;
  d.other_cores = 0.04;
  d.waiting_threads = 0.01;
  d.cores = d.needed = 2;
  return d;
}

// While it lives, this process shares one core with a busy child.
class SharedCore {
 public:
  SharedCore() {
    omp_set_num_threads(1);  // several threads on one core would spin for each other
    sched_getaffinity(0, sizeof before_, &before_);
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<std::size_t>(allowed_cpus().front()), &one);
    sched_setaffinity(0, sizeof one, &one);  // threads and children inherit it
    child_ = fork();
    if (child_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      for (volatile unsigned i = 0;;) i = i + 1;
    }
  }
  ~SharedCore() {
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
    sched_setaffinity(0, sizeof before_, &before_);
    omp_set_num_threads(threads_);
  }

 private:
  int threads_ = omp_get_max_threads();
  cpu_set_t before_;
  pid_t child_ = -1;
};

}  // namespace

TEST_CASE("a cell is disturbed when others take a core that it needs") {
  CHECK(!disturbed(quiet()));
  auto d = quiet();
  d.other_cores = 1;  // one busy process on two cores
  CHECK(disturbed(d));
  d.cores = 16;  // the cell needs two of them
  CHECK(!disturbed(d));
  d.other_cores = 14.05;
  CHECK(!disturbed(d));
  d.other_cores = 14.2;
  CHECK(disturbed(d));
  d.needed = 1;  // a GPU's host thread
  CHECK(!disturbed(d));
}

TEST_CASE("a time too short for the counters' ticks is judged by our threads' waits") {
  auto d = quiet();
  d.seconds = 0.02;
  d.other_cores = 1;  // 0.02 s of one core are two ticks
  CHECK(!disturbed(d));
  d.waiting_threads = 0.06;
  CHECK(disturbed(d));
  d.seconds = 0.04;
  d.waiting_threads = 0;
  CHECK(disturbed(d));
}

TEST_CASE("what is not known disturbs nothing") {
  auto d = quiet();
  d.other_cores = d.waiting_threads = std::nan("");
  CHECK(!disturbed(d));
  d.waiting_threads = 1;
  CHECK(disturbed(d));
}

namespace {

results::CellResult ended(const std::string& status, bool disturbed) {
  results::CellResult result;
  result.id = "cell";
  result.summary.status = status;
  results::add_label(result.summary, "graph");
  if (disturbed) results::add_label(result.summary, "disturbed");
  return result;
}

// The row after --strict, where the first `disturbed` runs are disturbed.
results::SummaryRow strict_row(int disturbed, int& runs) {
  runs = 0;
  return run_until_quiet([&] {
           results::CellResult result = ended("ok", runs < disturbed);
           result.summary.samples = ++runs;
           return result;
         })
      .summary;
}

}  // namespace

TEST_CASE("--strict runs a cell again while it is disturbed, at most three times, and keeps the last run") {
  for (const int disturbed : {0, 1, 3, 4, 9}) {
    CAPTURE(disturbed);
    int runs = 0;
    const results::SummaryRow row = strict_row(disturbed, runs);
    CHECK(runs == std::min(disturbed, 3) + 1);
    CHECK(row.samples == runs);
    CHECK(row.reruns == runs - 1);
    CHECK(results::has_label(row, "disturbed") == (disturbed > 3));
  }
  int runs = 0;
  CHECK(reruns_text(strict_row(0, runs)).empty());
  CHECK(reruns_text(strict_row(1, runs)) == ", run again once");
  CHECK(reruns_text(strict_row(9, runs)) == ", run again 3 times, and still disturbed");
}

TEST_CASE("--strict leaves a cell alone that failed, or that nobody disturbed") {
  int runs = 0;
  const auto failed = run_until_quiet([&] { return ++runs, ended("failed", true); });
  CHECK(runs == 1);
  CHECK(failed.summary.reruns == 0);
  results::SummaryRow row;
  row.labels = "undisturbed, graph";
  CHECK(!results::has_label(row, "disturbed"));
  CHECK(results::has_label(row, "graph"));
}

TEST_CASE("a cell beside a busy process on its core says so") {
  test::CellFixture f(test::tiny_model("llama-gqa3"), test::full_spec(), {Metric::score, Metric::latency});
  for (unsigned i = 0; i < 60; ++i) f.add(test::test_text(40, f.model->config.vocab, i), {}, 24);
  results::SummaryRow s;
  {
    const SharedCore shared;
    s = f.run().summary;
  }
  REQUIRE(s.status == "ok");
  CAPTURE(s.other_cores, s.waiting_threads, s.involuntary_switches, s.load);
  CHECK_THAT(s.labels, Catch::Contains("disturbed"));
  CHECK((s.other_cores > 0.1 || s.waiting_threads > 0.05));
  CHECK(s.involuntary_switches > 0);
  CHECK(s.voluntary_switches >= 0);
  CHECK(s.threads >= 1);
  CHECK(s.reruns == -1);
  CHECK(std::isnan(s.cpu_mhz_begin) == std::isnan(cpu_mhz()));
  CHECK(std::isnan(s.cpu_mhz_end) == std::isnan(cpu_mhz()));
  CHECK(std::isnan(s.gpu_mhz_begin));
}

TEST_CASE("a cell that is not timed says nothing of the machine") {
  test::CellFixture f(test::tiny_model("llama-gqa3"), test::full_spec(), {Metric::score});
  f.add(test::test_text(8, f.model->config.vocab, 1), {}, 2);
  const results::SummaryRow s = f.run().summary;
  CHECK(std::isnan(s.other_cores));
  CHECK(s.involuntary_switches == -1);
  CHECK(std::isnan(s.cpu_mhz_end));
  CHECK(s.labels.find("disturbed") == std::string::npos);
}
