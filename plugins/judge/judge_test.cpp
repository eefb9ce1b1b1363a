#include "test/support/metric_fixture.hpp"

using namespace kvlab;

namespace {

double judged(const std::string& command, const std::string& answer, const Record& record = {}, double seconds = 30) {
  return test::metric("judge", {{"command", command}, {"timeout", seconds}})->score(answer, {"yes", "o'k"}, record);
}

void fails(const std::string& command, const std::string& message) {
  CHECK_THROWS_WITH(judged(command, "a"), Catch::Contains("plugin judge") && Catch::Contains("score()") &&
                                              Catch::Contains(message) && Catch::Contains("wanted a judge"));
}

}  // namespace

TEST_CASE("judge: the program reads the question as JSON, and its number is the score") {
  CHECK(judged("echo 0.25", "a") == 0.25);
  CHECK(judged("cat > /dev/null; printf ' 1\r\n'", "a") == 1);
  // The whole input, with quotes, control characters, characters beyond the first plane and a byte that is no UTF-8.
  const std::string answer = R"({"answer": "\u0022\u00e9\u005c\u000a\ud83c\udf63\ufffd", )";
  CHECK(nlohmann::json::parse(answer + R"("x": 0})")["answer"] == "\"\u00e9\\\n\U0001f363\ufffd");
  const std::string rest =
      R"("references": ["yes", "o'\''k"], "record": {"q": ["x", "y"]}})";  // as the shell quotes it
  const std::string reads = "read -r line; test \"$line\" = '" + answer + rest + "' && echo 1";
  CHECK(judged(reads, "\"\u00e9\\\n\U0001f363\xff", {{"q", {"x", "y"}}}) == 1);
  CHECK(judged("cat | wc -c | awk '{print ($1 > 1000000)}'", std::string(1000000, 'x')) == 1);
}

TEST_CASE("judge: a program that fails gives an error, never a score") {
  fails("exit 3", "got a judge with exit code 3");
  fails("echo 1; exit 1", "exit code 1");
  fails("/no/such/judge 2> /dev/null", "exit code 127");
  fails("kill -9 $$", "got a judge");
  for (const char* text : {"", "good", "2", "-0.5", "nan", "inf", "1 0", "0.5 points"})
    fails("echo " + std::string(text), "got '" + std::string(text) + "'");
  CHECK_THROWS_WITH(judged("sleep 20; echo 1", "a", {}, 0.1), Catch::Contains("got no answer of the judge in 0.1"));
  CHECK_THROWS_WITH(test::metric("judge"), Catch::Contains("got no command"));
}
