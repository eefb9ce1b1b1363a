#include "test/support/task_fixture.hpp"

using namespace kvlab;
using test::TaskFixture;

TEST_CASE("kv: a JSON object, the asked pair at its depth") {
  const TaskFixture f("kv");
  const auto env = f.env(1);
  const auto task = f.task({{"context", std::int64_t{800}}, {"depth", std::int64_t{2}}});
  CHECK(task->metric() == "word");
  for (int i = 0; i < 2; ++i) {
    const TaskSample s = task->sample(i, env);
    const std::string text = env.decode(s.context), question = env.decode(s.questions[0].tokens);
    const std::string value = s.questions[0].references.at(0), key = question.substr(7, 36);
    CHECK(text.rfind("Extract the value corresponding to the specified key in the JSON object below.\n", 0) == 0);
    CHECK(question == "\nKey: \"" + key + "\"\nThe value associated with the specified key is:");
    const std::string pair = "\"" + key + "\": \"" + value + "\"";
    const std::size_t open = text.find("\n\nJSON data:\n{\"");
    REQUIRE(open != std::string::npos);
    CHECK(text.find(pair) == (i == 0 ? open + 14 : text.size() - pair.size() - 1));
    CHECK(text.back() == '}');
  }
}

TEST_CASE("kv: few pairs of short names") {
  const TaskFixture f("kv");
  const auto env = f.env(1);
  const auto task = f.task({{"context", std::int64_t{300}},
                            {"pairs", std::int64_t{3}},
                            {"key", std::string("word")},
                            {"value", std::string("number")}});
  const std::string text = env.decode(task->sample(0, env).context);
  std::size_t pairs = 0;
  for (std::size_t at = text.find("\": \""); at != std::string::npos; at = text.find("\": \"", at + 1)) ++pairs;
  CHECK(pairs == 3);
  CHECK(text.find("The grass is green.") < text.find("JSON data:"));
}

TEST_CASE("kv: more pairs than tokens are refused before any is made") {
  const TaskFixture f("kv");
  const auto task = f.task({{"context", std::int64_t{512}}, {"pairs", std::int64_t{100000}}});
  CHECK_THROWS_WITH(task->sample(0, f.env(1)),
                    Catch::Contains("got context: 512, wanted at least 100000: so many pairs"));
}
