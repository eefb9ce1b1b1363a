#include "test/support/task_fixture.hpp"

using namespace kvlab;
using test::TaskFixture;

TEST_CASE("multivalue: the references stand in the text in their order") {
  const TaskFixture f("multivalue");
  const auto env = f.env(4);
  const auto task = f.task({{"context", std::int64_t{600}}, {"values", std::int64_t{3}}});
  CHECK(task->metric() == "contains_all");
  const TaskSample s = task->sample(0, env);
  const std::string text = env.decode(s.context), question = env.decode(s.questions[0].tokens);
  const auto& values = s.questions[0].references;
  REQUIRE(values.size() == 3);
  const std::size_t begin = question.find(" for ") + 5;
  const std::string key = question.substr(begin, question.find(" mentioned") - begin);
  CHECK(question == "\nWhat are all the special magic numbers for " + key +
                        " mentioned in the provided text? The special "
                        "magic numbers for " +
                        key + " mentioned in the provided text are");
  std::size_t last = 0;
  for (const std::string& v : values) {
    const std::size_t at = text.find("One of the special magic numbers for " + key + " is: " + v + ".");
    REQUIRE(at != std::string::npos);
    CHECK(at > last);
    last = at;
  }
}
