#include "test/support/task_fixture.hpp"

using namespace kvlab;
using test::TaskFixture;

TEST_CASE("long_generation: demands are those of the prompt, the answer has the rest of the context") {
  const TaskFixture f("long_generation");
  const auto env = f.env(2);
  const auto task = f.task({{"context", std::int64_t{3000}},
                            {"form", std::string("document")},
                            {"entries", std::int64_t{20}},
                            {"once", std::int64_t{2}},
                            {"range", std::int64_t{3}},
                            {"period", std::int64_t{6}}});
  CHECK(task->metric() == "demands");
  const TaskSample s = task->sample(0, env);
  const TaskQuestion& q = s.questions[0];
  const std::string text = env.decode(q.tokens);
  CHECK(s.context.size() + q.tokens.size() + static_cast<std::size_t>(q.max_new_tokens) == 3000);
  const std::string opening = "*** started ***\n#*# Floor 1:";
  CHECK(text.substr(text.size() - opening.size()) == opening);
  std::size_t once = 0, range = 0;
  for (const std::string& d : q.references) {
    const std::size_t colon = d.find(": ");
    const int floor = std::stoi(d.substr(0, colon));
    CHECK((floor >= 1 && floor <= 20));
    const std::string use = d.substr(colon + 2);
    once += text.find("Designate Floor " + std::to_string(floor) + " for " + use + " use.") != std::string::npos;
    range += text.find(" for a " + use + ".\n") != std::string::npos;
    CHECK(text.find(use) != std::string::npos);
  }
  CHECK(once == 2);
  CHECK(range == 3);
  CHECK((q.references.size() == 2 + 3 + 3 || q.references.size() == 2 + 3 + 4));
}

TEST_CASE("long_generation: a list has each floor once, with all that is demanded of it") {
  const TaskFixture f("long_generation");
  const auto env = f.env(2);
  const auto task = f.task({{"context", std::int64_t{1500}},
                            {"entries", std::int64_t{12}},
                            {"once", std::int64_t{12}},
                            {"range", std::int64_t{2}},
                            {"period", std::int64_t{4}}});
  CHECK(task->metric() == "listed_demands");
  const TaskSample s = task->sample(0, env);
  const TaskQuestion& q = s.questions[0];
  const std::string text = env.decode(s.context);
  CHECK(env.decode(q.tokens) == "\nWrite the complete list, from floor 1 to floor 12. Number the lines.");
  std::size_t last = 0;
  std::map<int, std::string> floors;
  for (int floor = 1; floor <= 12; ++floor) {
    const std::string head = "\nFloor " + std::to_string(floor) + ": ";
    const std::size_t at = text.find(head);
    REQUIRE(at != std::string::npos);
    CHECK(at > last);
    last = at;
    floors[floor] = text.substr(at + head.size(), text.find('\n', at + 1) - at - head.size());
  }
  REQUIRE(q.references.size() == 12 + 2 + 3);
  for (const std::string& d : q.references)
    CHECK(floors.at(std::stoi(d)).find(d.substr(d.find(": ") + 2)) != std::string::npos);
}
