// `kvlab score`: answers that were made elsewhere, by a data set's metric.
#include <catch2/catch.hpp>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/child.hpp"

using Catch::Contains;
using namespace kvlab;
using test::Ended;
using test::Folder;

namespace {

// Three records; the second one accepts two answers and ends an answer at a line end.
const std::string data =
    R"({"id": "a", "input": "?", "context": "x", "answers": ["red fox"]})"
    "\n"
    R"({"id": "b", "input": "?", "context": "y", "answers": ["blue", "navy blue"], "stop": ["\n"]})"
    "\n"
    R"({"id": "c", "input": "?", "context": "z", "answers": ["seven"]})"
    "\n";

struct Scoring {
  Folder folder;
  explicit Scoring(const std::string& answers) {
    folder.write("data.jsonl", data);
    folder.write("answers.jsonl", answers);
  }
  Ended run(std::vector<std::string> more = {}) const {
    more.insert(more.begin(), {"score", folder / "data.jsonl", folder / "answers.jsonl"});
    return test::run_kvlab(more);
  }
};

const std::string in_order = R"({"answer": "red"})"
                             "\n"
                             R"({"answer": "navy blue\nred"})"
                             "\n"
                             R"({"answer": "eight"})"
                             "\n";

}  // namespace

// F1 of the words: 2/3 for one of two, 1 for a whole reference, 0.
TEST_CASE("kvlab score: the mean of the questions and the score of each") {
  const Scoring by_order(in_order);
  const Ended ended = by_order.run({"--format", "csv", "-o", by_order.folder / "scores.jsonl"});
  INFO(ended.said);
  REQUIRE(ended.code == 0);
  CHECK_THAT(ended.said, Contains("f1,3,0.555556,"));
  std::ifstream file(by_order.folder / "scores.jsonl");
  std::vector<std::pair<std::string, double>> scores;
  for (std::string line; std::getline(file, line);) {
    const nlohmann::json one = nlohmann::json::parse(line);
    scores.emplace_back(one["id"].get<std::string>(), one["score"].get<double>());
  }
  REQUIRE(scores.size() == 3);
  CHECK(scores[0] == std::pair<std::string, double>{"a", 2. / 3});
  CHECK(scores[1] == std::pair<std::string, double>{"b", 1});
  CHECK(scores[2] == std::pair<std::string, double>{"c", 0});
}

TEST_CASE("kvlab score: ids, another field, another metric and whole answers") {
  const Scoring by_id(R"({"id": "c", "pred": "seven"})"
                      "\n"
                      R"({"id": "b", "pred": "navy blue\nred"})"
                      "\n"
                      R"({"id": "a", "pred": "red fox"})"
                      "\n");
  CHECK_THAT(by_id.run({"--field", "pred", "--format", "csv"}).said, Contains("f1,3,1,"));
  CHECK_THAT(by_id.run({"--field", "pred", "--metric", "exact", "--format", "csv"}).said, Contains("exact,3,1,"));
  // With "red" behind it the second answer has precision 2/3.
  CHECK_THAT(by_id.run({"--field", "pred", "--whole", "--format", "csv"}).said, Contains("f1,3,0.933333,"));
}

TEST_CASE("kvlab score: answers that are missing, twice there or of no question are refused") {
  const auto refused = [](const std::string& answers, const std::string& message,
                          const std::vector<std::string>& more = {}) {
    const Scoring scoring(answers);
    const Ended ended = scoring.run(more);
    INFO(ended.said);
    CHECK(ended.code == 2);
    CHECK_THAT(ended.said, Contains(message));
  };
  refused(R"({"answer": "red"})", "got 1 answers without ids, wanted one for each question");
  refused(in_order + R"({"answer": "more"})", "got 4 answers, wanted 3");
  refused(R"({"id": "a", "answer": "x"})", "got no answer of id 'b', wanted one");
  refused(R"([{"id": "a", "answer": "x"}, {"id": "a", "answer": "y"}])", "got a second answer of id 'a', wanted one");
  refused(R"([{"id": "a", "answer": "x"}, {"answer": "y"}])", "got ids in 1 of 2 answers, wanted them in all or none");
  refused(in_order, "got nothing as 'text', wanted the answer's text", {"--field", "text"});
  refused(in_order, "--metric:1:", {"--metric", "nonsense"});
  refused("{", "got text that is no JSON");
}
