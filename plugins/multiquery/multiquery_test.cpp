#include "test/support/task_fixture.hpp"

using namespace kvlab;
using test::TaskFixture;

TEST_CASE("multiquery: one question about several keys") {
  const TaskFixture f("multiquery");
  const auto env = f.env(4);
  const auto task = f.task({{"context", std::int64_t{700}}, {"queries", std::int64_t{3}}, {"others", std::int64_t{2}}});
  const TaskSample s = task->sample(0, env);
  const std::string text = env.decode(s.context), question = env.decode(s.questions[0].tokens);
  REQUIRE(s.questions[0].references.size() == 3);
  std::string keys;
  for (std::size_t i = 0; i < 3; ++i) {
    const std::size_t end = text.find(" is: " + s.questions[0].references[i] + ".");
    REQUIRE(end != std::string::npos);
    const std::size_t begin = text.rfind(" for ", end) + 5;
    keys += std::string(i == 0 ? "" : i == 1 ? ", " : ", and ") + text.substr(begin, end - begin);
  }
  CHECK(question.rfind("\nWhat are all the special magic numbers for " + keys + " mentioned in the provided text?",
                       0) == 0);
  std::size_t facts = 0;
  for (std::size_t at = text.find(" is: "); at != std::string::npos; at = text.find(" is: ", at + 1)) ++facts;
  CHECK(facts == 5);
}
