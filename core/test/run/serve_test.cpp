// Cells with a workload, and their requests.
#include <catch2/catch.hpp>
#include <kvlab/error.hpp>

#include <cmath>
#include <fstream>
#include <numeric>

#include "run/requests.hpp"
#include "support/cell_fixture.hpp"
#include "support/task_fixture.hpp"

using namespace kvlab;

namespace {

std::vector<Item> items(int count) {
  std::vector<Item> out;
  for (int i = 0; i < count; ++i) {
    Item item;
    item.sample = i;
    item.prompt = test::test_text(12 + 20 * i, 90, static_cast<unsigned>(i) + 1);
    if (i == 1) item.fed = {5, 6};
    item.max_new = 4 + i;
    item.references = {"x"};
    item.sha256 = std::to_string(i);
    out.push_back(std::move(item));
  }
  return out;
}

WorkloadSpec poisson(int requests, double rate) {
  WorkloadSpec w;
  w.requests = requests;
  w.arrivals = Arrivals::poisson;
  w.rate = rate;
  return w;
}

}  // namespace

TEST_CASE("poisson arrivals have the rate, follow the seed and nothing else") {
  const auto all = items(3);
  const auto requests = make_requests(poisson(20000, 4), all, 1, ".");
  REQUIRE(requests.size() == 20000);
  double squares = 0, last = 0;
  for (const Request& r : requests) {
    const double gap = r.arrival_ms - last;
    REQUIRE(gap >= 0);
    squares += gap * gap;
    last = r.arrival_ms;
  }
  const double mean = last / 20000;
  CHECK(mean == Approx(250).epsilon(0.03));
  CHECK(squares / 20000 == Approx(2 * mean * mean).epsilon(0.08));  // the second moment of an exponential distribution
  CHECK(requests[4].prompt == all[1].prompt);
  CHECK(requests[4].fed == all[1].fed);
  CHECK(requests[4].max_new == all[1].max_new);
  CHECK(make_requests(poisson(5, 4), items(1), 1, ".")[4].arrival_ms == requests[4].arrival_ms);
  CHECK(make_requests(poisson(5, 4), all, 2, ".")[4].arrival_ms != requests[4].arrival_ms);
  for (const Request& r : make_requests({}, all, 1, ".")) CHECK(r.arrival_ms == 0);
}

TEST_CASE("a trace gives the arrivals; what is wrong with it is named by line") {
  const test::TaskFixture folder("text");
  const auto place = std::filesystem::temp_directory_path() / ("kvlab-text-" + std::to_string(getpid()));
  WorkloadSpec w;
  w.arrivals = Arrivals::trace;
  w.file = "trace.csv";
  folder.write("trace.csv", "# seconds\n0.5\n\n2, 100, 20\n1.25 x\n");
  const auto requests = make_requests(w, items(2), 1, place);
  REQUIRE(requests.size() == 3);
  CHECK(requests[0].arrival_ms == 500);
  CHECK(requests[1].arrival_ms == 2000);
  CHECK(requests[2].arrival_ms == 1250);
  w.requests = 2;
  CHECK(make_requests(w, items(2), 1, place).size() == 2);
  const auto where = [&] {
    try {
      make_requests(w, items(2), 1, place);
    } catch (const Error& e) {
      return e.where();
    }
    return std::string("no error");
  };
  w.requests = 4;
  CHECK(where() == (place / "trace.csv").string());
  for (const char* bad : {"1\nx\n", "1\n-1\n", "1\n2x\n", "1\nnan\n", "1\n1e300\n", "1\n,2\n"}) {
    CAPTURE(bad);
    folder.write("trace.csv", bad);
    CHECK(where() == (place / "trace.csv").string() + ":2");
  }
  folder.write("trace.csv", "# none\n");
  CHECK(where() == (place / "trace.csv").string());
  w.file = "absent.csv";
  CHECK(where() == (place / "absent.csv").string());
}

TEST_CASE("forced tokens and turns are no requests") {
  auto forced = items(1), turns = items(2);
  forced[0].forced = {1, 2};
  turns[1].follows = true;
  CHECK_THROWS_AS(make_requests({}, forced, 1, "."), Error);
  CHECK_THROWS_AS(make_requests({}, turns, 1, "."), Error);
}

TEST_CASE("a cell with a workload ends answers at their stop texts, unless it asks for the longest") {
  test::CellFixture f(test::tiny_model("llama-gqa3"), test::full_spec(), {Metric::score, Metric::memory});
  f.items.items = items(4);
  const results::CellResult longest = f.run();
  REQUIRE(longest.summary.status == "ok");
  for (std::size_t i = 0; i < 4; ++i) {
    const std::string& text = longest.samples[i].output;
    f.items.items[i].stops = {text.substr(text.size() / 2, 2)};
  }
  const results::CellResult plain = f.run();
  REQUIRE(plain.summary.status == "ok");
  f.experiment.workloads = {poisson(8, 500)};
  f.experiment.batch = 4;
  f.leave_for_pages(100'000, 4);
  for (const bool ignore : {false, true}) {
    CAPTURE(ignore);
    f.experiment.workloads[0].ignore_eos = ignore;
    const results::CellResult served = f.run();
    CAPTURE(served.summary.error);
    REQUIRE(served.summary.status == "ok");
    REQUIRE(served.samples.size() == 8);
    for (std::size_t i = 0; i < 8; ++i) {
      const results::SampleRow &got = served.samples[i], &want = (ignore ? longest : plain).samples[i % 4];
      CHECK(got.output == want.output);
      CHECK(got.stop == (ignore ? "length" : "text"));
      if (!ignore) CHECK(got.output_tokens == want.output_tokens);
    }
  }
}

TEST_CASE("a cell with a workload has the texts of one without, and every request's times") {
  test::CellFixture f(test::tiny_model("llama-gqa3"), test::full_spec(),
                      {Metric::score, Metric::memory, Metric::latency});
  Experiment& e = f.experiment;
  f.items.items = items(4);
  const results::CellResult plain = f.run();
  REQUIRE(plain.summary.status == "ok");
  CHECK(plain.summary.workload.empty());
  CHECK(plain.summary.preemptions == -1);

  e.workloads = {poisson(10, 50)};
  e.batch = 4;
  f.leave_for_pages(100'000, 4);
  for (const int chunk : {0, 16}) {
    CAPTURE(chunk);
    e.prefill_chunk = chunk;
    const results::CellResult served = f.run();
    CAPTURE(served.summary.error);
    REQUIRE(served.summary.status == "ok");
    CHECK(served.summary.workload == "10 requests, poisson 50/s");
    REQUIRE(served.samples.size() == 10);
    std::int64_t preemptions = 0;
    double later_ms = 0, later_tokens = 0;
    for (std::size_t i = 0; i < 10; ++i) {
      const auto& s = served.samples[i];
      const auto& alone = plain.samples[i % 4];
      CHECK(s.output == alone.output);
      CHECK(s.stop == alone.stop);
      CHECK(s.prompt_tokens == alone.prompt_tokens);
      CHECK(s.queue_ms >= 0);
      CHECK(s.ttft_ms >= s.queue_ms);
      const auto first = served.token_ms.begin() + served.token_offsets[i],
                 last = served.token_ms.begin() + served.token_offsets[i + 1];
      CHECK(last - first == s.output_tokens);
      CHECK(*first == Approx(s.ttft_ms));
      CHECK(s.arrival_ms + std::accumulate(first, last, 0.) == Approx(s.end_ms).epsilon(1e-4));
      preemptions += s.preemptions;
      later_ms += s.end_ms - s.arrival_ms - s.ttft_ms;
      later_tokens += static_cast<double>(s.output_tokens - 1);
    }
    CHECK(served.summary.preemptions == preemptions);
    CHECK(served.summary.tpot_ms_mean == Approx(later_ms / later_tokens).epsilon(1e-4));
    CHECK(served.summary.ttft_ms <= served.summary.ttft_ms_p95);
    CHECK(served.summary.tokens_per_s > 0);
    CHECK(!served.step_ms.empty());
  }
  f.leave_for_pages(10'000, 4);
  CHECK(f.run().summary.status == "oom");
}

TEST_CASE("requests draw the answers that their items draw without a workload, also after a preemption") {
  test::CellFixture f(test::tiny_model("llama-gqa3"), test::full_spec(), {Metric::score, Metric::memory});
  f.experiment.sampling.temperature = 1.2;
  f.experiment.sampling.draws = 2;
  f.items.items = items(4);
  f.items = drawn(f.items, 2, "");
  const results::CellResult plain = f.run();
  REQUIRE(plain.summary.status == "ok");
  f.experiment.workloads = {poisson(16, 500)};
  f.experiment.batch = 4;
  f.leave_for_pages(100'000, 4);
  for (const bool recompute : {false, true})
    for (const int chunk : {0, 16}) {
      CAPTURE(recompute, chunk);
      f.experiment.workloads[0].recompute = recompute;
      f.experiment.prefill_chunk = chunk;
      const results::CellResult served = f.run();
      CAPTURE(served.summary.error);
      REQUIRE(served.summary.status == "ok");
      for (std::size_t i = 0; i < 16; ++i) {
        CHECK(served.samples[i].output == plain.samples[i % 8].output);
        CHECK(served.samples[i].draw == plain.samples[i % 8].draw);
      }
      CHECK(served.summary.pass == plain.summary.pass);
    }
}
