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
