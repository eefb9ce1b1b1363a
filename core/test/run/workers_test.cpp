// Which workers may run beside each other while times are measured.
#include "run/workers.hpp"

#include <catch2/catch.hpp>
#include <cstdlib>
#include <optional>

#include <kvlab/error.hpp>

#include "run/gpus.hpp"

using namespace kvlab;
using Catch::Contains;

namespace {

// CUDA_VISIBLE_DEVICES while it lives.
class Visible {
 public:
  explicit Visible(const char* names) {
    if (const char* before = std::getenv(variable)) before_ = before;
    setenv(variable, names, 1);
  }
  ~Visible() { before_ ? setenv(variable, before_->c_str(), 1) : unsetenv(variable); }

 private:
  static constexpr const char* variable = "CUDA_VISIBLE_DEVICES";
  std::optional<std::string> before_;
};

Experiment experiment(const char* backend, int threads, Metric metric) {
  Experiment e;
  e.backend = backend;
  e.threads = threads;
  e.metrics = {metric};
  return e;
}

}  // namespace

TEST_CASE("workers of a machine: a GPU each while times are measured, else as many as you like") {
  const Visible two("4,6");
  for (const Metric metric : {Metric::latency, Metric::parts}) {
    const Experiment timed = experiment("cuda", 1, metric);
    CHECK_NOTHROW(check_beside(timed, 2, 1, "--jobs"));
    CHECK_THROWS_WITH(check_beside(timed, 3, 64, "--jobs"),
                      Contains("--jobs: got 3 workers and 2 GPUs on one machine"));
  }
  CHECK_NOTHROW(check_beside(experiment("cuda", 1, Metric::score), 9, 1, "--jobs"));
}

TEST_CASE("workers of a machine: cores of their own while times are measured on a CPU") {
  const Visible none("");
  CHECK_NOTHROW(check_beside(experiment("cpu", 2, Metric::latency), 4, 8, "--jobs"));
  CHECK_THROWS_WITH(check_beside(experiment("cpu", 2, Metric::latency), 4, 7, "--jobs"),
                    Contains("got 4 workers of 2 threads and 7 cores on one machine"));
  CHECK_THROWS_WITH(check_beside(experiment("cpu", 0, Metric::latency), 2, 8, "--jobs"),
                    Contains("wanted `threads` in the file"));
  CHECK_NOTHROW(check_beside(experiment("cpu", 0, Metric::latency), 1, 8, "--jobs"));
  CHECK_NOTHROW(check_beside(experiment("cpu", 0, Metric::memory), 9, 1, "--jobs"));
}

TEST_CASE("workers of a machine: a GPU has one worker where any experiment of the pool measures times on it") {
  const Experiment quality = experiment("cuda", 1, Metric::score), timed = experiment("cuda", 1, Metric::latency);
  CHECK_FALSE(time_on_gpu({quality, experiment("cpu", 1, Metric::latency)}));
  CHECK(time_on_gpu({quality, timed}));
}

TEST_CASE("what a run tells its workers: the device that it has, and which cells they run") {
  const WorkerOf of = WorkerOf::parse("mpi:cuda:0123");
  CHECK(of.engine == "mpi");
  CHECK(of.backend == "cuda");
  CHECK(of.cells == "0123");
  CHECK(of.word() == "mpi:cuda:0123");
  CHECK_THROWS_AS(WorkerOf::parse("mpi:cuda"), Error);
  CHECK(as_run_says(experiment("auto", 1, Metric::score), "here:cpu:0123").backend == "cpu");
  CHECK(as_run_says(experiment("auto", 1, Metric::score), "").backend == "auto");

  const std::vector<WorkerOf> two{{"mpi", "cuda", "0123"}, {"mpi", "cpu", "4567"}};
  CHECK(pool_word(two) == "mpi:cuda:0123+mpi:cpu:4567");
  CHECK(words_of_pool(pool_word(two)) == std::vector<std::string>{"mpi:cuda:0123", "mpi:cpu:4567"});
  CHECK(words_of_pool("here:cpu:0123") == std::vector<std::string>{"here:cpu:0123"});

  std::vector<Cell> cells(2);
  cells[0].id = "a", cells[1].id = "b";
  const std::string hash = hash_of(cells);
  CHECK(hash == hash_of(cells));
  cells[1].id = "c";
  CHECK(hash != hash_of(cells));
  cells[0].id = "ab", cells[1].id = "";
  CHECK(hash != hash_of(cells));
}
