#include "test/support/task_fixture.hpp"

using namespace kvlab;
using test::TaskFixture;

TEST_CASE("late_question: two questions in one cache, the second one counts") {
  const TaskFixture f("late_question");
  const auto env = f.env(2);
  const TaskSample s = f.task({{"context", std::int64_t{700}}})->sample(0, env);
  REQUIRE(s.questions.size() == 2);
  CHECK(!s.questions[0].follows);
  CHECK(s.questions[1].follows);
  CHECK(s.questions[0].references.empty());
  REQUIRE(s.questions[1].references.size() == 1);
  CHECK(env.decode(s.context).find(" is: " + s.questions[1].references[0] + ".") != std::string::npos);
  CHECK(s.context.size() + s.questions[0].tokens.size() + s.questions[1].tokens.size() + 2 * 16 == 700);
  const TaskSample three = f.task({{"score_first", true}})->sample(0, f.env(2, 2, 3));
  REQUIRE(three.questions.size() == 6);
  CHECK((three.questions[2].follows && !three.questions[3].follows && three.questions[4].follows));
  CHECK(three.questions[3].references.size() == 1);
}
