#include "papers/beside.hpp"

#include <catch2/catch.hpp>
#include <cmath>

using namespace kvlab;
using namespace kvlab::papers;
using results::SummaryRow;

namespace {

SummaryRow cell(const std::string& policy, const std::string& task, double score, double ms, double budget = NAN) {
  static int count = 0;
  SummaryRow row;
  row.cell = "cell" + std::to_string(++count);
  row.model = "m", row.policy = policy, row.task = task;
  row.params = std::isnan(budget) ? "{}" : "{\"budget\": " + std::to_string(budget) + "}";
  row.context_tokens = 1000;
  row.budget_tokens = budget;
  row.seed = 0;
  row.score = score, row.score_lo = score - 0.1, row.score_hi = score + 0.1;
  row.tpot_ms_p50 = ms;
  return row;
}

Ours one_run(std::vector<SummaryRow> rows) {
  Ours out;
  out.runs["table1"].summary.rows = std::move(rows);
  return out;
}

Reading reading(const std::string& policy, const std::string& task = "t1") {
  Reading r;
  r.policy = policy, r.task = task;
  return r;
}

// Ten questions of a context each: `right` of them are right.
std::vector<results::SampleRow> answers(int right) {
  std::vector<results::SampleRow> out;
  for (int i = 0; i < 10; ++i) {
    results::SampleRow row;
    row.sample = row.task_sample = i, row.question = 0;
    row.prompt_sha256 = "p" + std::to_string(i);
    row.score = i < right;
    out.push_back(row);
  }
  return out;
}

}  // namespace

TEST_CASE("a published value is set beside the cell that it names") {
  const Ours ours =
      one_run({cell("full", "t1", 0.5, 10), cell("mine", "t1", 0.4, 4, 64), cell("mine", "t1", 0.45, 5, 128),
               cell("full", "t2", 0.9, 10), cell("mine", "t2", 0.7, 5, 64)});
  Reading r = reading("mine");
  CHECK(our_value(r, ours).why == "several rows fit");
  r.budget = 64;
  CHECK(our_value(r, ours).value == 0.4);
  CHECK(our_value(r, ours).interval.low == Approx(0.3));
  r.as = "percent";
  CHECK(our_value(r, ours).value == Approx(40));
  CHECK(our_value(r, ours).interval.high == Approx(50));
  r.as = "ratio", r.read = "tpot_ms_p50";
  CHECK(our_value(r, ours).value == Approx(0.4));
  CHECK(std::isnan(our_value(r, ours).interval.low));
  r.as = "inverse";
  CHECK(our_value(r, ours).value == Approx(2.5));
  r.as = "saved";
  CHECK(our_value(r, ours).value == Approx(60));
  r.as = "retained", r.read = "score";
  CHECK(our_value(r, ours).value == Approx(80));

  Ours both = ours;
  both.runs["table1"].tasks = 2;
  r = reading("mine"), r.over_tasks = true, r.budget = 64;
  CHECK(our_value(r, both).value == Approx(0.55));
  r.groups = {{"t2"}};
  CHECK(our_value(r, both).value == Approx(0.7));
  r.groups = {{"t1", "t2"}, {"t2"}};  // a mean of means
  CHECK(our_value(r, both).value == Approx(0.625));
  r.groups = {{"t1", "t2"}, {"t1", "t3"}};
  CHECK(our_value(r, both).why == "1 of 2 tasks");
  r.groups.clear();
  both.runs["table1"].tasks = 3;
  CHECK(our_value(r, both).why == "2 of 3 tasks");
}

TEST_CASE("what is not there has a reason in place of a value") {
  SummaryRow failed = cell("broken", "t1", 0, 0);
  failed.status = "oom";
  Ours ours = one_run({cell("full", "t1", NAN, 10), failed, cell("mine", "t1", 0.4, 4)});
  CHECK(our_value(reading("other"), ours).why == "not run");
  CHECK(our_value(reading("full", "t9"), ours).why == "not run");
  CHECK(our_value(reading("broken"), ours).why == "oom");
  failed.policy = "mine";
  CHECK(our_value(reading("mine"), one_run({cell("mine", "t1", 0.4, 4), failed})).value == 0.4);
  CHECK(our_value(reading("full"), ours).why == "not measured");
  Reading r = reading("mine");
  r.as = "retained", r.against = "none";
  CHECK(our_value(r, ours).why == "none: not run");
  r = reading("mine"), r.context = 2000;
  CHECK(our_value(r, ours).why == "not run");
  r.context = 1010;
  CHECK(our_value(r, ours).value == 0.4);
  ours.runs["table2"] = ours.runs["table1"];
  CHECK(our_value(r, ours).why == "no run is named");
  r.run = "table2";
  CHECK(our_value(r, ours).value == 0.4);
}

TEST_CASE("what a policy retains has the interval of the ratio of both scores") {
  Ours ours = one_run({cell("full", "t1", 0.8, 1), cell("mine", "t1", 0.6, 1)});
  OurRun& run = ours.runs["table1"];
  run.samples[run.summary.rows[0].cell] = answers(8);
  run.samples[run.summary.rows[1].cell] = answers(6);
  Reading r = reading("mine");
  r.as = "retained";
  const OurValue v = our_value(r, ours);
  CHECK(v.value == Approx(75));
  CHECK(v.interval.low < 75);
  CHECK(v.interval.high > 75);
  CHECK(v.interval.low > 0);

  // Each text has twice the perplexity, whatever its own is.
  const double perplexity[] = {2, 3, 5, 8, 13, 21, 34, 55, 89, 144};
  for (std::size_t i = 0; i < 10; ++i)
    for (std::size_t cell = 0; cell < 2; ++cell) {
      results::SampleRow& row = run.samples[run.summary.rows[cell].cell][i];
      row.stop = "forced", row.output_tokens = 100;
      row.score = perplexity[i] * (cell == 1 ? 2 + 0.01 * static_cast<double>(i) : 1);
    }
  const OurValue texts = our_value(r, ours);
  CHECK(texts.interval.low > 200);  // percent
  CHECK(texts.interval.high < 210);
}

TEST_CASE("shared heads are those of the first profile that the second has, too") {
  const auto profile = [](std::vector<float> heads) {
    results::ProfileFile file;
    file.model = "m";
    file.profilers = {{"watch", "{}", {{"set", ProfileArray{{2, 2}, std::move(heads), ""}}}}};
    return file;
  };
  Ours ours;
  ours.profiles = {{"a", profile({1, 1, 1, 0})}, {"b", profile({0, 1, 0, 1})}};
  Reading r;
  r.read = "shared_heads", r.as = "percent", r.pair = {"a", "b"}, r.array = "set";
  CHECK(our_value(r, ours).value == Approx(100. / 3));
  r.pair = {"b", "a"};
  CHECK(our_value(r, ours).value == Approx(50));
  r.pair = {"b", "c"};
  CHECK(our_value(r, ours).why == "not run");
  r.pair = {"b", "a"}, r.array = "none";
  CHECK(our_value(r, ours).why == "no array none");
}

TEST_CASE("the page says of each value whether the paper's lies in our interval") {
  Item item;
  item.name = "table1", item.title = "Scores";
  item.setting = {{"model", "big"}, {"gpu", "one"}, {"engine", "theirs"}};
  item.columns = {"t1"};
  const auto row = [](const std::string& name, const std::string& missing, double value, const std::string& read) {
    PublishedRow out{name, missing, {{value, reading("mine")}}};
    out.values[0].reading.read = read;
    return out;
  };
  item.rows = {row("in", "", 0.45, "score"),         row("above", "", 0.9, "score"),
               row("below", "", 0.1, "score"),       row("time", "", 5, "tpot_ms_p50"),
               row("absent", "no code", 1, "score"), row("unprinted", "", NAN, "score")};
  const results::ReportPage page = beside("known", item, one_run({cell("mine", "t1", 0.4, 4)}));
  REQUIRE(page.tables.size() == 2);
  using Words = std::vector<std::string>;
  CHECK(page.tables[0].rows[0] == Words{"model", "big", "m"});
  CHECK(page.tables[0].rows[2] == Words{"engine", "theirs", "see the experiment"});
  const auto& rows = page.tables[1].rows;
  REQUIRE(rows.size() == 5);
  CHECK(rows[0] == Words{"in", "t1", "0.45", "0.4", "0.3-0.5", "inside"});
  CHECK(rows[1].back() == "ours is lower");
  CHECK(rows[2].back() == "ours is higher");
  CHECK(rows[3] == Words{"time", "t1", "5", "4", "-", "-20 %"});
  CHECK(rows[4] == Words{"absent [1]", "t1", "1", "-", "-", "cannot run"});
  CHECK(page.notes == Words{"no code"});
  CHECK(beside_csv(item, one_run({})).find("\nabsent,t1,1,-,-,cannot run\n") != std::string::npos);

  // A small experiment is no test of the paper's value.
  const results::ReportPage small = beside_small("known", item, one_run({cell("mine", "t1", 0.4, 4)}));
  CHECK(small.origins == Words{"known/table1: Scores"});
  CHECK(small.tables[1].title == "Scores (small: another model and task)");
  CHECK(small.tables[1].rows[1] == Words{"above", "t1", "0.9", "0.4", "0.3-0.5", "not compared"});
  CHECK(small.tables[1].rows[4].back() == "cannot run");
  CHECK(small.notes == Words{"no code"});
  CHECK(beside_small("known", item, one_run({})).tables[1].rows[1].back() == "not run");
}

TEST_CASE("of one run alone, values of other runs, of profiles and of rows that cannot run are left out") {
  Paper paper;
  paper.name = "known";
  Item& item = paper.items.emplace_back();
  item.name = "table1", item.title = "Scores", item.run = {"experiments/known/one.yaml", "experiments/known/two.yaml"};
  item.columns = {"t1"};
  const auto row = [&](const std::string& name, const std::string& run, const std::string& read) -> PublishedRow& {
    item.rows.push_back({name, "", {{0.45, reading("mine")}}});
    item.rows.back().values[0].reading.run = run, item.rows.back().values[0].reading.read = read;
    return item.rows.back();
  };
  row("own", "one", "score"), row("any", "", "score"), row("other", "two", "score"), row("heads", "", "array_mean");
  row("absent", "one", "score").missing = "no code";
  row("parts", "two", "part_ms");
  CHECK_FALSE(extra_of(item).parts);
  item.rows.back().values[0].reading.parts = {"gemm"};
  CHECK((extra_of(item).parts && !extra_of(item).ledgers));
  item.rows.back().values[0].reading.read = "fetched_bytes";
  CHECK(extra_of(item).ledgers);
  const OurRun run = one_run({cell("mine", "t1", 0.4, 4)}).runs["table1"];
  const auto names = [&](const std::string& stem) {
    const results::ReportPage page = beside_run({&paper, &item}, stem, run);
    std::vector<std::string> out;
    for (std::size_t t = 1; t < page.tables.size(); ++t)
      for (const auto& cells : page.tables[t].rows) out.push_back(cells[0] + ": " + cells.back());
    return out;
  };
  CHECK(names("one") == std::vector<std::string>{"own: inside", "any: inside"});
  item.rows.erase(item.rows.begin(), item.rows.begin() + 2);
  CHECK(names("one").empty());

  // The experiment's path ends with that of the item, wherever the tree is.
  const std::vector<Paper> papers{paper};
  REQUIRE(items_of(papers, "/elsewhere/experiments/known/two.yaml").size() == 1);
  CHECK(items_of(papers, "/elsewhere/experiments/known/two.yaml").front().name() == "known/table1");
  CHECK(items_of(papers, "/elsewhere/more_experiments/known/two.yaml").empty());
  CHECK(items_of(papers, "").empty());
  CHECK(choose(papers, "known/table1", "test").item->title == "Scores");
  CHECK_THROWS_WITH(choose(papers, "known/tabel1", "test"), Catch::Contains("did you mean 'known/table1'"));
}

TEST_CASE("fetched bytes are the mean over the steps that bring any to the device") {
  const auto row = [](std::int64_t step, const std::string& tier, const std::string& tag, std::int64_t moved) {
    results::LedgerRow out;
    out.engine_step = step, out.tier = tier, out.tag = tag, out.moved = moved;
    return out;
  };
  // Steps 1 and 3 bring 30 + 30 and 10 + 10 bytes of keys and values. Step 0 takes all to the host, and step 2 nothing.
  const std::vector<results::LedgerRow> ledger{row(0, "host", "keys", 500),  row(0, "host", "values", 500),
                                               row(1, "device", "keys", 30), row(1, "device", "values", 30),
                                               row(2, "device", "keys", 0),  row(2, "device", "values", 0),
                                               row(3, "device", "keys", 10), row(3, "device", "values", 10)};
  CHECK(mean_fetched(ledger) == 40);
  CHECK(std::isnan(mean_fetched({ledger[0], ledger[1], ledger[4]})));

  Ours ours = one_run({cell("mine", "t1", NAN, 1)});
  OurRun& run = ours.runs["table1"];
  Reading r = reading("mine");
  r.read = "fetched_bytes";
  CHECK(our_value(r, ours).why == "not measured");
  run.fetched[run.summary.rows[0].cell] = mean_fetched(ledger);
  CHECK(our_value(r, ours).value == 40);
}

TEST_CASE("parts of a step are means over decode steps") {
  results::CellResult log;
  log.parts = {"gemm", "score", "select"};
  log.step_device_ms = {NAN, 4, 6};  // the first step is a prompt
  log.step_parts = {100, 100, 100, 4, 1, 0, 6, 2, 3};
  const auto means = mean_parts(log);
  CHECK(means == std::map<std::string, double>{{"gemm", 5}, {"score", 1.5}, {"select", 1.5}});
  Ours ours = one_run({cell("mine", "t1", NAN, 1)});
  OurRun& run = ours.runs["table1"];
  run.parts[run.summary.rows[0].cell] = means;
  Reading r = reading("mine");
  r.read = "part_ms", r.parts = {"score", "select"};
  CHECK(our_value(r, ours).value == Approx(3));
  r.read = "part_share", r.as = "percent";
  CHECK(our_value(r, ours).value == Approx(37.5));
  r.parts = {"recall"};
  CHECK(our_value(r, ours).why == "not measured");
}

TEST_CASE("pass, lengths and requests at once are read of a cell") {
  Ours ours = one_run({cell("mine", "t1", 0.5, 10)});
  SummaryRow& row = ours.runs["table1"].summary.rows[0];
  Reading r = reading("mine");
  r.read = "pass";
  CHECK(our_value(r, ours).why == "not measured");
  row.pass = 0.75, row.pass_lo = 0.5, row.pass_hi = 0.9;
  r.as = "percent";
  CHECK(our_value(r, ours).value == Approx(75));
  CHECK(our_value(r, ours).interval.low == Approx(50));
  CHECK(our_value(r, ours).interval.high == Approx(90));

  r.as = "value";
  for (const char* read : {"prompt_tokens", "answer_tokens", "requests_at_once"}) {
    r.read = read;
    CHECK(our_value(r, ours).why == "not measured");
  }
  std::vector<results::SampleRow> samples(3);
  for (std::size_t i = 0; i < 3; ++i) {
    samples[i].prompt_tokens = 100 + 10 * static_cast<std::int64_t>(i);
    samples[i].output_tokens = i == 0 ? 1 : 4;
  }
  ours.runs["table1"].samples[row.cell] = samples;
  const auto value = [&](const char* read) {
    r.read = read;
    return our_value(r, ours).value;
  };
  CHECK(value("prompt_tokens") == 110);
  CHECK(value("answer_tokens") == 3);
  CHECK(std::isnan(value("requests_at_once")));  // no times
  // Requests are inside from 0 to 4, from 1 + 1 to 6 and from 5 to 10: 13 ms of 10.
  const double times[3][3] = {{0, 0, 4}, {1, 1, 6}, {5, 0, 10}};
  for (std::size_t i = 0; i < 3; ++i)
    samples[i].arrival_ms = times[i][0], samples[i].queue_ms = times[i][1], samples[i].end_ms = times[i][2];
  ours.runs["table1"].samples[row.cell] = samples;
  CHECK(value("requests_at_once") == Approx(1.3));
}

TEST_CASE("a profile's array is read by its mean, its least and its greatest number") {
  Ours ours;
  results::ProfileFile file;
  file.profilers = {{"p", "{}", {{"cosine", {{2, 2}, {0.5f, 0.25f, NAN, 0.75f}, ""}}}}};
  ours.profiles.emplace("heads", file);
  Reading r;
  r.array = "cosine";
  const auto value = [&](const char* read) {
    r.read = read;
    return our_value(r, ours);
  };
  CHECK(value("array_mean").value == 0.5);
  CHECK(value("array_least").value == 0.25);
  CHECK(value("array_most").value == 0.75);
  r.as = "percent";
  CHECK(value("array_least").value == 25);
  r.array = "sine";
  CHECK(value("array_least").why == "no array sine");
  r.run = "feet";
  CHECK(value("array_least").why == "not run");
  r.run.clear();
  ours.profiles.emplace("more", file);
  CHECK(value("array_least").why == "no run is named");
}
