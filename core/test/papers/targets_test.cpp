#include "papers/targets.hpp"

#include <catch2/catch.hpp>
#include <cmath>

#include "experiment/reader.hpp"
#include "support/child.hpp"

using namespace kvlab;
using namespace kvlab::papers;
using Catch::Contains;
using test::Folder;

namespace {

const std::string head =
    "title: T\ngpu: G\nruns:\n"
    "  one: {experiment: a.yaml, seconds: 10}\n"
    "  heads: {experiment: h.yaml, seconds: 3}\n"
    "  two: {experiment: a.yaml, set: [batch=2], profiles: {mine: heads}, seconds: 20}\n"
    "  ops: {bench: [copy], seconds: 5}\n"
    "  others: {peers: true, seconds: 5}\n"
    "rows:\n";

TargetTable read(const std::string& rows) {
  const Folder folder;
  return read_targets(folder.write("known.yaml", head + rows));
}

std::vector<std::string> errors_of(const std::string& rows) {
  try {
    read(rows);
  } catch (const ExperimentError& e) {
    std::vector<std::string> out;
    for (const Error& one : e.errors()) out.emplace_back(one.what());
    return out;
  }
  return {};
}

OurRun run_with(double full, double mine) {
  OurRun out;
  for (const auto& [policy, ms] : {std::pair{"full", full}, {"mine", mine}}) {
    results::SummaryRow row;
    row.cell = policy, row.model = "m", row.policy = policy, row.task = "t";
    row.tpot_ms_p50 = ms;
    out.summary.rows.push_back(row);
  }
  return out;
}

// Rows with one form each: mine takes 3 ms and full 4 ms.
double formed(const std::string& as, const std::string& more = "") {
  const TargetTable table =
      read("  r: {title: R, of: {run: one, policy: mine, read: tpot_ms_p50}, against: {policy: full}, as: " + as +
           ", at_most: 1" + more + "}\n");
  TargetResults results;
  results.ours.runs["one"] = run_with(4, 3);
  return measure(table.rows[0], results).value;
}

nlohmann::json line(const std::string& shape, const std::string& kernel, double seconds) {
  return {{"op", "copy"},          {"shape", shape}, {"kernel", kernel}, {"seconds_median", seconds},
          {"rate", 1e9 / seconds}, {"percent", 80}};
}

}  // namespace

TEST_CASE("a target's number is what its form makes of two terms") {
  CHECK(formed("ratio") == Approx(0.75));
  CHECK(formed("inverse") == Approx(4. / 3));
  CHECK(formed("percent") == Approx(75));
  CHECK(formed("saved") == Approx(25));
  CHECK(formed("beyond") == Approx(100 * (1 - 4. / 3)));
  // (3 - 2) / (4 - 2)
  const TargetTable table = read(
      "  r: {title: R, of: {run: one, policy: mine, read: tpot_ms_p50}, against: {policy: full}, without: {run: two, "
      "policy: mine}, as: ratio, at_most: 1}\n");
  TargetResults results;
  results.ours.runs["one"] = run_with(4, 3);
  results.ours.runs["two"] = run_with(9, 2);
  CHECK(measure(table.rows[0], results).value == Approx(0.5));
}

TEST_CASE("a target is met at its bound, missed beyond it, and what has no number says why") {
  const TargetTable table = read(
      "  most: {title: R, of: {run: one, policy: mine, read: tpot_ms_p50}, at_most: 3}\n"
      "  least: {title: R, of: {run: one, policy: mine, read: tpot_ms_p50}, at_least: 3}\n"
      "  less: {title: R, of: {run: one, policy: mine, read: tpot_ms_p50}, at_most: 2.9}\n"
      "  more: {title: R, of: {run: one, policy: mine, read: tpot_ms_p50}, at_least: 3.1}\n"
      "  absent: {title: R, of: {run: one, policy: yours, read: tpot_ms_p50}, at_least: 3.1}\n"
      "  later: {title: R, of: {run: two, policy: mine, read: tpot_ms_p50}, at_least: 3.1}\n"
      "  never: {title: R, why_not: no such part, at_least: 20}\n");
  TargetResults results;
  results.ours.runs["one"] = run_with(4, 3);
  const auto verdict_of = [&](std::size_t i) {
    return verdict(table.rows[i], measure(table.rows[i], results), results);
  };
  CHECK(verdict_of(0) == "met");
  CHECK(verdict_of(1) == "met");
  CHECK(verdict_of(2) == "missed");
  CHECK(verdict_of(3) == "missed");
  CHECK(verdict_of(4) == "not run");
  CHECK(verdict_of(5) == "not run");
  CHECK(verdict_of(6) == "no such part");
  results.failed["two"] = "ended with exit code 3";
  CHECK(verdict_of(5) == "two ended with exit code 3");
  results.not_judged = "small";
  CHECK(verdict_of(0) == "small");
  const std::string csv = target_csv(table, results, {"most", "never"});
  CHECK_THAT(csv, Contains("most,R,3,<= 3,small") && Contains("never,R,-,>= 20,no such part") && !Contains("least"));
}

TEST_CASE("results of another GPU are no results of the table's") {
  TargetTable table = read("  r: {title: R, why_not: never, at_most: 1}\n");
  table.gpu = "NVIDIA H200";
  TargetResults results;
  CHECK(on_its_gpu(table, results));
  results.lines["ops"] = {{"device", "NVIDIA H200, 143771 MiB, sm_90"}, {"ops", nlohmann::json::array()}};
  results.lines["peers"] = {{"device", "NVIDIA H200"}, {"ops", nlohmann::json::array()}};
  results.ours.runs["one"].summary.info.backend = "cuda";
  results.ours.runs["one"].summary.info.gpu = "NVIDIA H200";
  CHECK(on_its_gpu(table, results));
  results.ours.runs["two"].summary.info.backend = "cpu";
  CHECK_FALSE(on_its_gpu(table, results));
  results.ours.runs.erase("two");
  results.lines["ops"]["device"] = "NVIDIA H100 80GB HBM3, 81559 MiB";
  CHECK_FALSE(on_its_gpu(table, results));
}

TEST_CASE("a line of kvlab bench is named by shape and kernel, those beside a step by what is read") {
  const std::string of = "  r: {title: R, of: {run: ops, op: copy, shape: s, ";
  const TargetTable table =
      read(of + "read: us}, at_most: 1}\n" + "  k: " + of.substr(5) + "kernel: b, read: gb_per_s}, at_most: 1}\n" +
           "  n: " + of.substr(5) + "kernel: b, read: gb_per_s_beside}, at_most: 1}\n" + "  d: " + of.substr(5) +
           "kernel: b, read: slowdown}, at_most: 1}\n" + "  x: {title: R, of: {run: ops, op: copy, " +
           "shape: other, read: us}, at_most: 1}\n");
  TargetResults results;
  nlohmann::json beside = line("s", "b", 0.5);
  beside["beside"] = {{"slowdown_percent", 7}};
  results.lines["ops"] = {{"device", "G"}, {"ops", {line("s", "a", 1), line("s", "b", 2), beside}}};
  CHECK(measure(table.rows[0], results).why == "several lines fit");
  CHECK(measure(table.rows[1], results).value == Approx(0.5));
  CHECK(measure(table.rows[2], results).value == Approx(2));
  CHECK(measure(table.rows[3], results).value == 7);
  CHECK(measure(table.rows[4], results).why == "no such line");
  results.lines["ops"]["ops"].erase(0);
  CHECK(measure(table.rows[0], results).value == Approx(2e6));  // microseconds
}

TEST_CASE("the runs of a row are those that it reads, and the profiles that they need") {
  const TargetTable table = read(
      "  a: {title: R, of: {run: one, policy: mine, read: tpot_ms_p50}, at_most: 1}\n"
      "  b: {title: R, of: {run: two, policy: mine, read: tpot_ms_p50}, against: {run: one}, as: ratio, at_most: 1}\n"
      "  c: {title: R, why_not: never, at_most: 1}\n"
      "beside: {title: B, ours: ops, peers: others, shapes: {1 x 2: s}}\n");
  const auto names = [&](const std::vector<std::string>& rows) {
    std::string out;
    for (const TargetRun* run : table.runs_of(rows)) out += run->name + " ";
    return out;
  };
  CHECK(names({"a"}) == "one ");
  CHECK(names({"b"}) == "one heads two ");
  CHECK(names({"c"}).empty());
  CHECK(names({}) == "one heads two ops others ");
}

TEST_CASE("errors of a table of targets are found by name, all of them") {
  const auto row = [](const std::string& rest) { return "  r: {title: R, " + rest + "}\n"; };
  const std::string of = "of: {run: one, policy: p, read: tpot_ms_p50}";
  CHECK(errors_of(row(of + ", at_most: 1")).empty());
  const auto first = [&](const std::string& rest) {
    const auto all = errors_of(row(rest));
    return all.empty() ? std::string() : all.front();
  };
  CHECK_THAT(first(of), Contains("got no target, wanted one of: at_most, at_least"));
  CHECK_THAT(first(of + ", at_most: 1, at_least: 1"), Contains("got both 'at_most' and 'at_least'"));
  CHECK_THAT(first("at_most: 1"), Contains("got no key 'of'"));
  CHECK_THAT(first(of + ", against: {policy: q}, at_most: 1"), Contains("got 'against' beside as: value"));
  CHECK_THAT(first(of + ", as: ratio, at_most: 1"), Contains("got as: ratio without 'against'"));
  CHECK_THAT(first("of: {run: none, policy: p, read: tpot_ms_p50}, at_most: 1"), Contains("got no run 'none'"));
  CHECK_THAT(first("of: {run: ops, policy: p, read: tpot_ms_p50}, at_most: 1"),
             Contains("got run 'ops', wanted one with an experiment"));
  CHECK_THAT(first("of: {run: one, op: copy, shape: s, read: us}, at_most: 1"),
             Contains("got run 'one', wanted one of `bench` or `peers`"));
  CHECK_THAT(first("of: {run: ops, op: copy, read: us}, at_most: 1"), Contains("got no key 'shape'"));
  CHECK_THAT(first("of: {run: ops, op: copy, shape: s, read: ms}, at_most: 1"), Contains("wanted one of: us"));
  CHECK_THAT(first(of + ", at_mist: 1"), Contains("did you mean 'at_most'"));
  CHECK_THAT(first("of: {run: one, policy: p, read: tpot_ms_p50, as: ratio}, at_most: 1"), Contains("got key 'as'"));
  const Folder folder;
  CHECK_THROWS_WITH(read_targets(folder.write("x.yaml", "title: T\ngpu: G\nruns: {a: {seconds: 1}}\nrows: {}\n")),
                    Contains("got a run of no or several sorts"));
  CHECK_THROWS_WITH(read_targets(folder.write("x.yaml", "title: T\ngpu: G\nruns: {a: {experiment: e}}\nrows: {}\n")),
                    Contains("got no 'seconds'"));
}

TEST_CASE("decoded tokens a second: the most requests at one moment by the median time of a token") {
  OurRun run = run_with(4, 5);
  const auto add = [&](double arrival, double ttft, double end) {
    results::SampleRow row;
    row.arrival_ms = arrival, row.ttft_ms = ttft, row.end_ms = end;
    run.samples["mine"].push_back(row);
  };
  add(0, 10, 30), add(0, 20, 40), add(5, 25, 50);  // the third begins when the first ends
  Ours ours;
  ours.runs["one"] = run;
  Reading reading;
  reading.policy = "mine", reading.read = "decode_tokens_per_s";
  CHECK(our_value(reading, ours).value == Approx(2 / 5e-3));
  ours.runs["one"].samples["mine"][2].ttft_ms = 24;
  CHECK(our_value(reading, ours).value == Approx(3 / 5e-3));
  ours.runs["one"].samples["mine"][2].end_ms = NAN;
  CHECK(our_value(reading, ours).why == "not measured");
}
