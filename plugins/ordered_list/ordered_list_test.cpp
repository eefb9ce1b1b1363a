#include "test/support/task_fixture.hpp"

using namespace kvlab;
using test::TaskFixture;

TEST_CASE("ordered_list: the references follow the question, or the text") {
  const TaskFixture f("ordered_list");
  const auto env = f.env(2);
  for (const char* order : {"named", "text"}) {
    const auto task =
        f.task({{"context", std::int64_t{900}}, {"items", std::int64_t{5}}, {"order", std::string(order)}});
    CHECK(task->metric() == "in_order");
    const TaskSample s = task->sample(0, env);
    const std::string text = env.decode(s.context), question = env.decode(s.questions[0].tokens);
    std::size_t last = 0;
    REQUIRE(s.questions[0].references.size() == 5);
    for (const std::string& v : s.questions[0].references) {
      const std::size_t end = text.find(" is: " + v + "."), begin = text.rfind(" for ", end) + 5;
      REQUIRE(end != std::string::npos);
      const std::size_t at = order == std::string("text") ? end : question.find(text.substr(begin, end - begin));
      REQUIRE(at != std::string::npos);
      CHECK(at > last);
      last = at;
    }
  }
}

TEST_CASE("ordered_list: the score is the share of places with the right item") {
  const TaskFixture f("ordered_list");
  const auto task = f.task({{"context", std::int64_t{900}}});
  const auto score = [&](const char* answer, const std::vector<std::string>& references) {
    return task->score(answer, references).value();
  };
  const std::vector<std::string> wanted{"11", "22", "33", "44"};
  for (const char* answer : {"11, 22, 33, 44.", "1. 11\n2. 22\n3) 33\n- 44", "a-b: 11\nc d: 22\ne: 33\nf: 44\n",
                             " 11, 22, 33, and 44.\n", "11;22;33;44;55"})
    CHECK(score(answer, wanted) == 1);
  CHECK(score("11, 33, 22, 44", wanted) == 0.5);
  CHECK(score("00, 11, 22, 33, 44", wanted) == 0);
  CHECK(score("11, 22", wanted) == 0.5);
  CHECK(score("", wanted) == 0);
}
