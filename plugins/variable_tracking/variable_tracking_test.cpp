#include <sstream>

#include "test/support/task_fixture.hpp"

using namespace kvlab;
using test::TaskFixture;

TEST_CASE("variable_tracking: the chain can be followed from the value to the references") {
  const TaskFixture f("variable_tracking");
  const auto env = f.env(2);
  const auto task = f.task({{"context", std::int64_t{900}}, {"chains", std::int64_t{2}}, {"hops", std::int64_t{3}}});
  const TaskSample s = task->sample(0, env);
  const std::string text = env.decode(s.context), question = env.decode(s.questions[0].tokens);
  const std::string value = question.substr(question.find(" the value ") + 11, 5);
  CHECK(question ==
        "\nQuestion: Find all variables that are assigned the value " + value +
            " in the text above. Answer: According to the chain(s) of variable assignment in the text above, 4 "
            "variables are assgined the value " +
            value + ", they are:");
  std::string held = value;
  std::size_t last = 0;
  for (const std::string& name : s.questions[0].references) {
    const std::size_t at = text.find("\nVAR " + name + " = " + held);
    REQUIRE(at != std::string::npos);
    CHECK(at > last);
    last = at;
    held = "VAR " + name;
  }
  CHECK(s.questions[0].references.size() == 4);
}

TEST_CASE("variable_tracking: RULER's worked example before the text, or none") {
  const TaskFixture f("variable_tracking");
  const auto env = f.env(2);
  const std::string intro = "Memorize and track the chain(s)";
  const std::string text = env.decode(f.task({{"context", std::int64_t{1500}}})->sample(0, env).context);
  const std::size_t last = text.rfind(intro);
  const std::string example = text.substr(text.find(intro), last - text.find(intro));
  const std::string lead = "5 variables are assgined the value ", end = ", they are:";
  const std::size_t at = example.find(lead);
  REQUIRE(at != std::string::npos);
  std::string held = example.substr(at + lead.size(), 5);
  std::istringstream names(example.substr(example.find(end) + end.size()));
  int count = 0;
  for (std::string name; names >> name; ++count) {
    CHECK(name.size() == 3);
    CHECK(example.find("\nVAR " + name + " = " + held) != std::string::npos);
    held = "VAR " + name;
  }
  CHECK(count == 5);
  const std::size_t tokens = env.encode(example).size();
  CHECK((tokens > 450 && tokens <= 510));
  const TaskSample none = f.task({{"context", std::int64_t{1500}}, {"examples", std::int64_t{0}}})->sample(0, env);
  CHECK(env.decode(none.context).rfind(intro) == env.decode(none.context).find(intro));
}

TEST_CASE("variable_tracking: more variables than tokens are refused before any is made") {
  const TaskFixture f("variable_tracking");
  const auto task =
      f.task({{"context", std::int64_t{512}}, {"chains", std::int64_t{1000}}, {"hops", std::int64_t{1000}}});
  CHECK_THROWS_WITH(task->sample(0, f.env(1)),
                    Catch::Contains("got context: 512, wanted at least 1001000: so many variables"));
}
