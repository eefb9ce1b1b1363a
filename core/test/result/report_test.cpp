#include "result/report.hpp"

#include <algorithm>
#include <catch2/catch.hpp>
#include <kvlab/error.hpp>
#include <sstream>

#include "result/report_layout.hpp"
#include "result/results_sample.hpp"
#include "result/warnings.hpp"

using namespace kvlab::results;
using Catch::Contains;

namespace {

SummaryRow row(const std::string& cell, const std::string& policy, double budget, double score) {
  SummaryRow r;
  r.cell = cell;
  r.model = "bundled/recall";
  r.policy = policy;
  r.params = "{}";
  r.task = "niah";
  r.context_tokens = 2048;
  r.budget_tokens = budget;
  r.seed = 1;
  r.score = score;
  r.fired = 10;
  r.compression = 4;
  return r;
}

std::string text_of(const std::vector<SummaryRow>& rows, Format format = Format::table) {
  Summary summary;
  summary.info.kvlab_version = "0.1.0";
  summary.rows = rows;
  return report(summary, format);
}

std::string line_with(const std::string& text, const std::string& what) {
  const std::size_t at = text.find(what);
  if (at == std::string::npos) return "";
  const std::size_t begin = text.rfind('\n', at) + 1;
  return text.substr(begin, text.find('\n', at) - begin);
}

}  // namespace

TEST_CASE("cells with a workload have a table of their own, one for each workload") {
  auto slow = row("a", "full", not_measured, 1), fast = row("b", "full", not_measured, 1);
  slow.workload = "9 requests, poisson 2/s";
  fast.workload = "9 requests, poisson 8/s";
  slow.tokens_per_s = 1234;
  slow.ttft_ms = 56;
  slow.ttft_ms_p95 = 78;
  slow.tpot_ms_mean = 34.5;
  slow.preemptions = 91;
  slow.overhead = 0.0275;
  const std::string text = text_of({slow, fast, row("c", "full", not_measured, 0.25)});
  CHECK_THAT(text, Contains("context 2048, 9 requests, poisson 2/s\n") &&
                       Contains("context 2048, 9 requests, poisson 8/s\n") && Contains("context 2048\n"));
  CHECK_THAT(line_with(text, "1234"), Contains("56") && Contains("78") && Contains("34.5") && Contains("91"));
  CHECK_THAT(line_with(text, "tokens/s"), Contains("TTFT ms p50") && Contains("ms/token mean") &&
                                              Contains("preempt.") && Contains("overhead %") && !Contains("KL"));
  CHECK_THAT(line_with(text, "1234"), Contains("2.75"));
  CHECK(text.find("overhead %") == text.rfind("overhead %"));  // only where it was measured
}

TEST_CASE("a budget of equal bytes shows the tokens that were found") {
  auto bytes = row("a", "snapkv", not_measured, 1), equal = row("b", "random", 320, 1);
  bytes.budget_bytes = equal.budget_bytes = 1'500'000;
  const std::string text = text_of({bytes, equal});
  CHECK_THAT(line_with(text, "snapkv"), Contains("1.5 MB") && !Contains("="));
  CHECK_THAT(line_with(text, "random"), Contains("1.5 MB = 320"));
}

TEST_CASE("one block per model, task and context, one row per policy and budget") {
  auto other = row("d", "full", not_measured, 1);
  other.context_tokens = 8192;
  const std::string text =
      text_of({row("a", "full", not_measured, 1), other, row("b", "snap", 512, 0.75), row("c", "snap", 256, 0.5)});
  CHECK_THAT(text,
             Contains("bundled/recall, niah, context 2048\n") && Contains("bundled/recall, niah, context 8192\n"));
  CHECK(text.find("snap") < text.find("8192"));
  CHECK_THAT(line_with(text, " 512 "), Contains("0.75"));
  CHECK_THAT(line_with(text, " 256 "), Contains("0.5"));
  CHECK_THAT(line_with(text, "full"), Contains(" -  "));
  CHECK(text.find("nan") == std::string::npos);
  CHECK(text.find("warning") == std::string::npos);
}

TEST_CASE("repeats and seeds become mean, sample standard deviation and n") {
  auto a = row("a", "snap", 512, 0.25), b = row("b", "snap", 512, 0.5), c = row("c", "snap", 510, 0.75);
  b.repeat = 1;
  c.seed = 2;
  a.kl = 1;
  const std::string line = line_with(text_of({a, b, c}), "snap");
  CHECK_THAT(line, Contains("0.5 ± 0.25") && Contains(" 3 "));  // squares 2 * 0.25^2 over n - 1
  CHECK_THAT(line, Contains(" 1  "));                           // the one measured KL has no spread
  auto lone = row("d", "snap", 512, 0.5);
  lone.score_lo = 0.4;
  lone.score_hi = 0.6;
  CHECK_THAT(text_of({lone}), Contains("0.5 (0.4-0.6)") && Contains("score [1]") &&
                                  Contains("[1] in brackets: 95 % interval over contexts"));
  lone.score_lo = lone.score_hi = not_measured;
  CHECK_THAT(text_of({lone}), Contains("0.5 (-)") && !Contains("interval"));
}

TEST_CASE("rows of one policy show the parameters in which they differ") {
  auto a = row("a", "snap", 512, 1), b = row("b", "snap", 512, 1);
  a.params = R"({"window": 32, "kernel": 7, "budget": {"tokens": 512}, "deep": {"rule": "max"}})";
  b.params = R"({"window": 64, "kernel": 7, "budget": {"tokens": 256}, "deep": {"rule": "mean"}})";
  const std::string text = text_of({a, b});
  CHECK_THAT(text, Contains("snap deep.rule=max window=32 ") && Contains("snap deep.rule=mean window=64 "));
  CHECK(text.find("kernel") == std::string::npos);
  b.params = "not JSON";
  CHECK_THAT(text_of({a, b}), Contains("snap deep.rule=max"));
}

TEST_CASE("a table of drawn answers has avg and pass of as many, and says how they were drawn") {
  auto full = row("a", "full", not_measured, 0.75), mine = row("b", "mine", 64, 0.5);
  for (SummaryRow* r : {&full, &mine}) {
    r->draws = 8;
    r->sampling = "temperature 0.6, 8 draws, seed 1";
    r->labels = "sampled";
    r->pass = 0.9, r->pass_lo = 0.6, r->pass_hi = 0.98;
  }
  const std::string text = text_of({full, mine});
  CHECK_THAT(line_with(text, "avg@8"), Contains("pass@8") && !Contains("score"));
  CHECK_THAT(line_with(text, "mine"), Contains(" 0.9 (0.6-0.98)"));
  CHECK_THAT(text, Contains("sampled: answers are drawn (temperature 0.6, 8 draws, seed 1)"));
  // Rows of other numbers of draws have a score alone.
  mine.draws = 4;
  CHECK_THAT(line_with(text_of({full, mine}), "budget"), Contains("score") && !Contains("pass@"));
  mine.draws = full.draws = 1;
  CHECK_THAT(line_with(text_of({full, mine}), "budget"), Contains("score") && !Contains("pass@"));
}

TEST_CASE("failures, labels and policies that never acted are said") {
  auto oom = row("a", "big", not_measured, not_measured);
  oom.status = "oom";
  oom.error = "wanted 68 GB\nof 24 GB";
  auto idle = row("b", "idle", 512, 1);
  idle.fired = 0;
  idle.compression = 1;
  auto labelled = row("c", "codec", 512, 1);
  labelled.labels = "functional, new";
  const std::string text = text_of({oom, idle, labelled});
  CHECK_THAT(line_with(text, "big"), Contains("[1]") && Contains(" oom "));
  CHECK_THAT(text, Contains("[1] oom: cell a: wanted 68 GB of 24 GB\n"));
  CHECK_THAT(line_with(text, "codec"), Contains("[2] [3]"));
  CHECK_THAT(text, Contains("[2] functional: ") && Contains("[3] new\n"));
  CHECK_THAT(text, Contains("warning: idle never acted in bundled/recall, niah, context 2048: fired 0"));

  const auto warns = [&](auto change) {
    auto r = idle;
    change(r);
    return text_of({r}).find("warning") != std::string::npos;
  };
  CHECK(warns([](SummaryRow& r) { r.compression = not_measured; }));
  CHECK(!warns([](SummaryRow& r) { r.fired = -1; }));                    // not measured
  CHECK(!warns([](SummaryRow& r) { r.budget_tokens = not_measured; }));  // no budget
  CHECK(!warns([](SummaryRow& r) { r.budget_tokens = 2048; }));
  CHECK(!warns([](SummaryRow& r) { r.compression = 2; }));  // a codec: smaller without an edit
  // Answers of one token have no decode step, in which a selector would act. A scorer acts in the prompt, too.
  CHECK(!warns([](SummaryRow& r) { r.samples = r.output_tokens = 5; }));
  CHECK(warns([](SummaryRow& r) { r.samples = r.output_tokens = 5, r.by_age = 0; }));
  CHECK_THAT(text_of({}), Contains("no cell has finished"));
}

TEST_CASE("cells' warnings stand under the tables, each once, with the cells that they belong to") {
  std::vector<SummaryRow> rows;
  for (const char* id : {"a", "b", "c", "d", "e"}) rows.push_back(row(id, "snap", 512, 1));
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i].seed = static_cast<std::int64_t>(i);
  rows[1].warnings = "of one";
  for (std::size_t i = 0; i < 2; ++i) rows[i].warnings += (i ? "\n" : "") + std::string("of two");
  for (std::size_t i = 1; i < 5; ++i) rows[i].warnings += "\nof \x1b[31mfour";
  const std::string text = text_of(rows);
  CHECK_THAT(text, Contains("warning: of one (cell b)\n") && Contains("warning: of two (cells a, b)\n"));
  CHECK_THAT(text, Contains("warning: of \\x1b[31mfour (cells b, c, d and 1 more)\n"));
  CHECK(text.find("warning: ") > text.rfind("snap"));
  for (SummaryRow& r : rows) r.warnings = "of all";
  CHECK_THAT(text_of(rows), Contains("warning: of all (every cell)\n"));
}

TEST_CASE("a warning of a result file is one line, and a policy that never acted is said once") {
  CHECK(column_of({"two\nlines", "\x1b[2J"}) == "two lines\n\\x1b[2J");
  SummaryRow idle = row("a", "idle", 512, 1);
  idle.fired = 0;
  idle.compression = 1;
  const std::string warning = never_acted(idle);
  REQUIRE(!warning.empty());
  CHECK(warnings_of(idle) == std::vector<std::string>{warning});  // an earlier version wrote no such text
  idle.warnings = column_of({"another", warning});
  CHECK(warnings_of(idle) == std::vector<std::string>{"another", warning});
}

TEST_CASE("columns line up by what a terminal shows") {
  CHECK(display_width("abc") == 3);
  CHECK(display_width("é") == 1);
  CHECK(display_width("e\xcc\x81") == 1);  // e and a combining accent
  CHECK(display_width("日本") == 4);
  CHECK(display_width("🙂") == 2);
  CHECK(display_width("\xff\xc3") == 2);  // no UTF-8: no crash
  const std::string text = text_of({row("a", "plain", 512, 1), row("b", "日本é", 512, 1)});
  CHECK(display_width(line_with(text, "plain")) == display_width(line_with(text, "日本é")));
}

TEST_CASE("markdown, LaTeX and CSV are escaped") {
  CHECK(escape_markdown("a|b_c*<d>") == "a\\|b\\_c\\*\\<d\\>");
  CHECK(escape_latex("50% & a_b {x} #1 [2] $ ~ ^ \\ 0.5 ± 1 × é") ==
        "50\\% \\& a\\_b \\{x\\} \\#1 {[}2] \\$ \\textasciitilde{} \\textasciicircum{} \\textbackslash{} 0.5 $\\pm$ 1 "
        "$\\times$ é");
  CHECK(quote_csv("plain") == "plain");
  CHECK(quote_csv("a,\"b\"\n") == "\"a,\"\"b\"\"\n\"");
  CHECK_THAT(text_of({row("a", "my_policy", 512, 1)}, Format::md), Contains("| my\\_policy | 512 | 1 (-) |"));
  CHECK_THAT(text_of({row("a", "my_policy", 512, 1)}, Format::latex), Contains("my\\_policy & 512 & 1 (-) & "));
  auto r = row("a", "p", 512, 0.1);
  r.error = "a,b";
  const std::string csv = text_of({r}, Format::csv);
  CHECK(csv.substr(0, 25) == "cell,model,policy,params,");
  CHECK_THAT(csv, Contains(",\"a,b\",") && Contains(",0.1,,,,"));
  CHECK(std::count(csv.begin(), csv.end(), '\n') == 2);
}

TEST_CASE("csv has a column per parameter, empty where a policy does not have it") {
  auto a = row("a", "p", 64, 0.1), b = row("b", "q", 64, 0.2);
  a.params = R"({"scorer": {"snapkv": {"window": 8, "seed": 3}}, "budget": {"tokens": 64}})";
  b.params = R"({"policy": {"q": {"mode": "a,b"}}})";
  const std::string csv = text_of({a, b}, Format::csv);
  const auto ends = [&](int line, const std::string& wanted) {
    std::istringstream in(csv);
    std::string text;
    for (int i = 0; i <= line; ++i) std::getline(in, text);
    CAPTURE(text);
    CHECK((text.size() > wanted.size() && text.substr(text.size() - wanted.size()) == wanted));
  };
  ends(0, ",budget.tokens,mode,params.seed,window");
  ends(1, ",64,,3,8");
  ends(2, R"(,,"a,b",,)");
}

namespace {

constexpr const char* snap = R"({"scorer": {"snap": {}}})";

// A cell of policy NAME with one 0/1 answer per context: `rights` has a '1' for each right one.
CellResult answered(const std::string& id, const std::string& policy, const std::string& params,
                    const std::string& rights) {
  CellResult c;
  c.id = id;
  c.summary = row(id, policy, params == snap ? 64 : not_measured, not_measured);
  c.summary.params = params;
  for (std::size_t i = 0; i < rights.size(); ++i) {
    SampleRow s;
    s.sample = s.task_sample = static_cast<std::int64_t>(i);
    s.question = 0;
    s.prompt_sha256 = "prompt " + std::to_string(i);
    s.score = rights[i] - '0';
    s.output = rights[i] == '1' ? "it" : "a b a b a b";
    s.output_tokens = rights[i] == '1' ? 2 : 6;
    s.stop = rights[i] == '1' ? "eos" : "length";
    c.samples.push_back(s);
  }
  return c;
}

std::string words_of(const std::string& line) {  // single blanks
  std::istringstream in(line);
  std::string out;
  for (std::string word; in >> word;) out += (out.empty() ? "" : " ") + word;
  return out;
}

}  // namespace

TEST_CASE("under a table of scores stands one of differences to what keeps everything") {
  const TemporaryFolder dir;
  write_part(dir / "o.h5", answered("a", "full", R"({"page_size": 16})", "1111111100"), sample_info());
  write_part(dir / "o.h5", answered("b", "snap", snap, "0000000110"), sample_info());
  const std::string text = report(dir / "o.h5", Format::table);
  CHECK_THAT(text, Contains("against full [1]: 10 questions in 10 contexts\n"));
  const std::string differences = text.substr(text.find("against full"));
  // 7 lost, 1 won: p = 2 * (1 + 8) / 256. 28 and 52 tokens. The last word of a cut answer does not count for a loop.
  CHECK_THAT(words_of(line_with(differences, "snap")),
             Catch::StartsWith("snap 64 ~-0.6 (") && Catch::EndsWith(") 0.07 7 1 1 1 1.86 8 0"));
  CHECK_THAT(words_of(line_with(differences, "full     ")), Catch::StartsWith("full - - - - -"));
  CHECK_THAT(text, Contains("smallest difference that this table can detect: ") && !Contains("noise floor"));
  CHECK_THAT(report(dir / "o.h5", Format::latex), Contains("smallest difference that this table"));
  const std::string csv = report(dir / "o.h5", Format::csv);
  CHECK(std::count(csv.begin(), csv.end(), '\n') == 3);
}

TEST_CASE("several policies have adjusted tests and ranks, and what keeps everything twice is the noise floor") {
  const TemporaryFolder dir;
  const std::string right(40, '1'), wrong(40, '0');
  write_part(dir / "o.h5", answered("a", "full", "{}", right), sample_info());
  write_part(dir / "o.h5", answered("b", "again", "{}", "0" + right.substr(1)), sample_info());
  write_part(dir / "o.h5", answered("c", "bad", snap, wrong), sample_info());
  write_part(dir / "o.h5", answered("d", "mild", snap, "00" + right.substr(2)), sample_info());
  const std::string text = report(dir / "o.h5", Format::table), under = text.substr(text.find("against full"));
  CHECK_THAT(line_with(under, "difference ["), Contains("Holm") && Contains("rank"));
  CHECK_THAT(words_of(line_with(under, "bad ")), Contains("<1e-4 <1e-4 40 0 0 0") && Catch::EndsWith("3 (3-3)"));
  CHECK_THAT(words_of(line_with(under, "mild ")), Contains("~-0.05") && Contains(" 0.5 0.5 2 0 38 0 "));
  CHECK_THAT(words_of(line_with(under, "again ")), Contains("~-0.025") && Contains(" 1 - 1 0 39 0 "));
  CHECK_THAT(text, Contains("noise floor, full against full in 1 comparison: a difference of 0.025 at most, 1 of 40 "
                            "answers flipped, 1 other texts\n"));
  const std::string grey = report({dir / "o.h5"}, {Format::table, {}, true});
  CHECK_THAT(grey, Contains("\x1b[90mmild") && Contains("\x1b[90magain") && !Contains("\x1b[90mbad"));
  CHECK(text.find('\x1b') == std::string::npos);
}

TEST_CASE("the interval of several cells is over all of their contexts, and repeats add none") {
  const TemporaryFolder dir;
  auto later = answered("b", "snap", snap, "11"), repeat = answered("c", "snap", snap, "1");
  for (SampleRow& s : later.samples) s.prompt_sha256 += " of another seed";
  later.summary.seed = 2;
  repeat.summary.repeat = 1;
  for (CellResult cell : {answered("a", "snap", snap, "1"), later, repeat}) {
    cell.summary.score = 1;
    write_part(dir / "o.h5", cell, sample_info());
  }
  // Wilson's interval of 3 of 3: 1 / (1 + 1.96^2 / 3).
  CHECK_THAT(report(dir / "o.h5", Format::table), Contains("1 ± 0 (0.4385-1)"));
}

TEST_CASE("repeats of what keeps everything measure the noise floor, too") {
  const TemporaryFolder dir;
  auto again = answered("b", "full", "{}", "0111111111");
  again.summary.repeat = 1;
  write_part(dir / "o.h5", answered("a", "full", "{}", "1111111111"), sample_info());
  write_part(dir / "o.h5", again, sample_info());
  write_part(dir / "o.h5", answered("c", "snap", snap, "1111111111"), sample_info());
  CHECK_THAT(report(dir / "o.h5", Format::table),
             Contains("a difference of 0.1 at most, 1 of 10 answers flipped, 1 other texts"));
}

TEST_CASE("any two rows are compared by name, and names that fit none or several are refused") {
  const TemporaryFolder dir;
  write_part(dir / "o.h5", answered("a", "snap", snap, "1111111100"), sample_info());
  auto wide = answered("b", "snap", snap, "0000000110");
  wide.summary.budget_tokens = 256;
  write_part(dir / "o.h5", wide, sample_info());
  write_part(dir / "o.h5", answered("c", "quest", snap, "1111111111"), sample_info());
  const auto compared = [&](const std::string& a, const std::string& b) {
    return report({dir / "o.h5"}, {Format::table, {a, b}, false});
  };
  const std::string text = compared("snap 256", "snap 64");
  CHECK_THAT(text, Contains("snap 256 against snap 64 [1]: 10 questions"));
  CHECK_THAT(words_of(line_with(text, "256  ")), Contains(" 7 1 1 1 "));
  CHECK_THAT(compared("quest", "snap 64"), Contains("quest 64 against snap 64"));
  CHECK(report(dir / "o.h5", Format::table).find("against") == std::string::npos);  // nothing keeps everything
  CHECK_THROWS_WITH(compared("snap", "quest"), Contains("which 2 rows of") && Contains("snap 64, snap 256"));
  CHECK_THROWS_WITH(compared("none", "quest"), Contains("wanted two of: quest 64, snap 256, snap 64"));
  CHECK_THROWS_AS(report({dir / "o.h5"}, {Format::csv, {"quest", "snap 64"}, false}), kvlab::Error);
}

TEST_CASE("rows of several files share a table, each with its file's name, against that file's full") {
  const TemporaryFolder dir;
  write_part(dir / "cpu.h5", answered("a", "full", "{}", "1111111111"), sample_info());
  write_part(dir / "cpu.h5", answered("b", "snap", snap, "1111111110"), sample_info());
  write_part(dir / "gpu.h5", answered("a", "full", "{}", "1111111100"), sample_info());
  write_part(dir / "gpu.h5", answered("b", "snap", snap, "1111111000"), sample_info());
  const std::string text = report({dir / "cpu.h5", dir / "gpu.h5"}, {});
  const std::string under = text.substr(text.find("against cpu:full"));
  CHECK_THAT(words_of(line_with(under, "gpu:full")), Contains("-0.2 ("));
  CHECK_THAT(words_of(line_with(under, "cpu:snap")), Contains("-0.1 ("));
  CHECK_THAT(words_of(line_with(under, "gpu:snap")), Contains("-0.1 ("));
  CHECK_THAT(text, Contains("noise floor, full against full in 1 comparison"));
}

TEST_CASE("formats have names and a report can be made of a file") {
  CHECK(parse_format("latex") == Format::latex);
  CHECK_THROWS_AS(parse_format("html"), kvlab::Error);
  const TemporaryFolder dir;
  write_part(dir / "o.h5", sample_cell("a"), sample_info());
  CHECK_THAT(report(dir / "o.h5", Format::table), Contains("snapkv") && Contains("kvlab 0.1.0 (8c3065a)"));
  CHECK_THROWS_AS(report(dir / "missing.h5", Format::table), kvlab::Error);
}
