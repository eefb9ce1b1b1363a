// `kvlab report --ladder`: tables from random eviction to an oracle.
#include "result/ladder.hpp"

#include <catch2/catch.hpp>
#include <cmath>
#include <map>
#include <sstream>

#include "base/log.hpp"
#include "result/results_sample.hpp"

using namespace kvlab::results;
using Catch::Contains;

namespace {

struct Cell {
  std::string policy;
  int right = 0;  // of 20 contexts: the first ones
  std::string labels = "";
  double tokens = 64;
  std::string params = "{}";
};

CellResult cell_of(const Cell& c) {
  static int count = 0;
  CellResult out;
  out.id = out.summary.cell = "c" + std::to_string(++count);
  out.summary.model = "m";
  out.summary.task = "t";
  out.summary.policy = c.policy;
  out.summary.params = c.params;
  out.summary.labels = c.labels;
  out.summary.budget_tokens = c.tokens;
  out.summary.device_bytes_decode = 1e6;
  out.summary.score = c.right / 20.;
  if (const auto at = c.policy.find(" -"); at != c.policy.npos) out.summary.ablated = c.policy.substr(at + 2);
  for (int i = 0; i < 20; ++i) {
    SampleRow& s = out.samples.emplace_back();
    s.sample = s.task_sample = i;
    s.question = 0;
    s.prompt_sha256 = std::to_string(i);
    s.score = i < c.right;
    s.stop = "eos";
  }
  return out;
}

class File {
 public:
  File& add(const CellResult& cell) {
    write_part(path_, cell, sample_info());
    return *this;
  }
  File& add(const Cell& cell) { return add(cell_of(cell)); }
  std::string text(Format format = Format::md) const {
    ReportOptions options;
    options.format = format;
    options.ladder = true;
    return report({path_}, options);
  }
  // The rows of the csv: their values by column.
  std::vector<std::map<std::string, std::string>> rows() const {
    std::vector<std::map<std::string, std::string>> out;
    const auto split = [](const std::string& line) {
      std::vector<std::string> words{""};
      for (const char c : line) c == ',' ? void(words.emplace_back()) : words.back().push_back(c);
      return words;
    };
    std::istringstream in(text(Format::csv));
    std::string line;
    std::getline(in, line);
    const auto header = split(line);
    while (std::getline(in, line)) {
      const auto words = split(line);
      REQUIRE(words.size() == header.size());
      out.emplace_back();
      for (std::size_t c = 0; c < words.size(); ++c) out.back()[header[c]] = words[c];
    }
    return out;
  }

 private:
  TemporaryFolder dir_;
  std::string path_ = dir_ / "o.h5";
};

}  // namespace

TEST_CASE("a ladder goes from random to the oracle, and an ablation stands before its method") {
  CellResult recency = cell_of({"newest", 16});  // by its place it would stand above all methods
  recency.summary.by_age = 1;
  File file;
  file.add({"oracle", 20, "oracle"}).add({"best", 12}).add({"full", 19, "", not_measured});
  file.add({"worse", 8}).add({"best -vote", 6}).add(recency).add({"random", 4});
  const auto rows = file.rows();
  std::vector<std::string> order, places;
  for (const auto& row : rows) {
    order.push_back(row.at("policy"));
    places.push_back(row.at("place"));
  }
  CHECK(order == std::vector<std::string>{"random", "newest", "worse", "best -vote", "best", "oracle"});
  // (right - 4) / (20 - 4)
  CHECK(places == std::vector<std::string>{"0", "0.75", "0.25", "0.125", "0.5", "1"});
  CHECK((rows[0].at("place_lo").empty() && rows[5].at("place_hi").empty()));
  CHECK(std::stod(rows[4].at("place_lo")) < 0.5);
  CHECK(std::stod(rows[4].at("place_hi")) > 0.5);
  CHECK((rows[4].at("questions") == "20" && rows[4].at("span") == "0.8"));
  const std::string text = file.text();
  CHECK_THAT(text, Contains("### m, t, 64 tokens: from random to oracle") && Contains("oracle - random: 0.8 (") &&
                       Contains("20 questions in 20 contexts") && Contains("scores without a budget: full 0.95"));
  CHECK_THAT(text, Contains("| best | 64 | 1 | 0.6 (") && Contains("| 0.5 (") && Contains("count beyond both ends"));
  CHECK_THAT(text, !Contains("times random's bytes") && !Contains("warning"));
  CHECK_THAT(text, Contains("oracle: knows what no method can know in time, never timed") && !Contains("bound, never"));
  CHECK_THAT(file.text(Format::latex), Contains("\\begin{tabular}"));
}

TEST_CASE("a block with an oracle of eviction and one of selection has a ladder of each") {
  const std::string evicts = R"({"scorer": {"some": {}}})", selects = R"({"selector": {"some": {}}})";
  File file;
  file.add({"reads", 18, "", 64, selects}).add({"keeps", 8, "", 64, evicts}).add({"does all", 10});
  file.add({"sees", 20, "oracle", 64, selects}).add({"foresees", 12, "oracle", 64, evicts});
  file.add({"foresees more", 14, "oracle", 64, evicts}).add({"random", 4, "", 64, R"({"scorer": {"random": {}}})"});
  std::map<std::string, std::vector<std::string>> ladders;
  std::map<std::string, std::string> places;
  for (const auto& row : file.rows()) {
    ladders[row.at("oracle")].push_back(row.at("policy"));
    places[row.at("oracle") + "/" + row.at("policy")] = row.at("place");
  }
  CHECK(ladders == std::map<std::string, std::vector<std::string>>{
                       {"foresees", {"random", "keeps", "does all", "foresees more", "foresees"}},
                       {"sees", {"random", "does all", "reads", "sees"}}});
  CHECK(places["foresees/keeps"] == "0.5");           // (8 - 4) / (12 - 4)
  CHECK(places["foresees/foresees more"] == "1.25");  // (14 - 4) / (12 - 4)
  CHECK(places["sees/reads"] == "0.875");             // (18 - 4) / (20 - 4)
  CHECK(places["sees/does all"] == "0.375");
  CHECK_THAT(file.text(), Contains("64 tokens: from random to oracle, of eviction") &&
                              Contains("64 tokens: from random to oracle, of selection"));
  CHECK_THAT(file.text(),
             Contains("oracle: chooses by the true attention of the step that reads: a bound, never timed") &&
                 Contains("oracle: keeps what the full cache's recorded answer attends to: a reference, "
                          "no bound, never timed"));
}

TEST_CASE("draws of random count together, whatever label their scorer has") {
  File file;
  file.add({"draws", 8, "", 64, R"({"scorer": {"random": {"seed": 0}}})"});
  file.add({"draws", 0, "", 64, R"({"scorer": {"random": {"seed": 1}}})"});
  file.add({"bound", 20, "oracle"}).add({"some", 12});
  const auto rows = file.rows();
  REQUIRE(rows.size() == 3);
  CHECK(rows[0].at("policy") == "draws (2 draws)");
  CHECK(std::stod(rows[0].at("score")) == Approx(0.2));
  CHECK(std::stod(rows[1].at("place")) == Approx(0.5));  // (12 - 4) / (20 - 4)
}

TEST_CASE("each budget has a ladder of its own, and one without an end says what it lacks") {
  File file;
  file.add({"random", 4}).add({"oracle", 20, "oracle"}).add({"some", 12});
  file.add({"random", 10, "", 256}).add({"some", 15, "", 256});
  file.add({"oracle", 19, "oracle", 1024}).add({"some", 15, "", 1024});
  const auto rows = file.rows();
  CHECK(rows.size() == 3);
  CHECK_THAT(file.text(),
             Contains("m, t, 256 tokens: no ladder: got random, wanted a finished row with the label oracle") &&
                 Contains("m, t, 1024 tokens: no ladder: got an oracle, wanted a finished row of the policy random"));
}

TEST_CASE("a table whose oracle is not above random gives no place and says why") {
  File near;
  near.add({"random", 10}).add({"some", 11}).add({"oracle", 11, "oracle"});
  CHECK_THAT(near.text(), Contains("this table cannot tell: oracle - random is 0.05 (-") && Contains("| - |"));
  for (const auto& row : near.rows()) CHECK(row.at("place").empty());
  File below;
  below.add({"random", 18}).add({"some", 11}).add({"oracle", 2, "oracle"});
  CHECK_THAT(below.text(), Contains("this table cannot tell: oracle - random is -0.8 (-"));
}

TEST_CASE("a ladder refuses random weights, and a file without its ends") {
  File synthetic;
  synthetic.add({"random", 4, "synthetic"}).add({"oracle", 20, "oracle,synthetic"});
  CHECK_THAT(synthetic.text(), Contains("m, t: no ladder: random weights"));
  const kvlab::log::Collected collected;
  CHECK(synthetic.rows().empty());
  REQUIRE(collected.warnings().size() == 1);  // csv has no place for the reason
  CHECK_THAT(collected.warnings()[0], Contains("m, t: no ladder: random weights"));
  File plain;
  plain.add({"full", 20, "", not_measured}).add({"some", 12});
  CHECK_THAT(plain.text(), Contains("m, t: no ladder: wanted a finished row of the policy random and one with"));
}

TEST_CASE("a ladder names bytes that differ by more than 5 %, rows that failed, and questions that are missing") {
  CellResult near = cell_of({"near", 12}), far = cell_of({"far", 12}), failed = cell_of({"lost", 0}),
             selector = cell_of({"reads", 12, "", 64, R"({"selector": {"reads": {}}})"}), part = cell_of({"part", 12});
  near.summary.device_bytes_decode = 1.04e6;
  far.summary.device_bytes_decode = 1.5e6;
  selector.summary.device_bytes_decode = 4e6;
  failed.summary.status = "failed";
  failed.summary.error = "got nothing";
  failed.samples.clear();
  part.samples.resize(15);
  File file;
  file.add({"random", 4}).add({"oracle", 20, "oracle"}).add(near).add(far).add(failed).add(selector).add(part);
  const std::string text = file.text();
  CHECK_THAT(text, Contains("holds 1.5 times random's bytes on the device") &&
                       Contains("holds 4 times random's bytes on the device: a selector drops nothing") &&
                       !Contains("holds 1.04"));
  CHECK_THAT(text, Contains("| failed | - |") && Contains("got nothing") && Contains("only 15 of 20 questions"));
  // The first 15 contexts: (12 - 4) / (15 - 4).
  CHECK(std::stod(file.rows()[4].at("place")) == Approx(8 / 11.));
}

TEST_CASE("texts stand on a ladder by their nats per token") {
  const auto text = [](const char* policy, double nats, const char* labels) {
    CellResult cell = cell_of({policy, 0, labels});
    cell.summary.score = std::exp(nats);
    for (SampleRow& s : cell.samples) {
      s.stop = "forced";
      s.output_tokens = 10;
      s.score = std::exp(nats + 0.01 * static_cast<double>(s.sample));
    }
    return cell;
  };
  File file;
  file.add(text("random", 4, "")).add(text("some", 2.5, "")).add(text("oracle", 2, "oracle"));
  const auto rows = file.rows();
  CHECK(std::stod(rows[1].at("place")) == Approx(0.75));  // (4 - 2.5) / (4 - 2)
  CHECK_THAT(file.text(), Contains("random's nats per token - oracle's: 2"));
}
