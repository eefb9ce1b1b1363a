#include "test/support/task_fixture.hpp"

using namespace kvlab;
using test::TaskFixture;

TEST_CASE("passkey: InfiniteBench's wording, the key at its depth") {
  const TaskFixture f("passkey");
  const auto env = f.env(1);
  const auto task = f.task({{"context", std::int64_t{500}}, {"depth", std::int64_t{3}}});
  CHECK(task->metric() == "first_integer");
  for (int i = 0; i < 3; ++i) {
    const TaskSample s = task->sample(i, env);
    const std::string text = env.decode(s.context), key = s.questions[0].references.at(0);
    const std::string head =
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
        "about the important information there.\n\n";
    CHECK(text.rfind(head, 0) == 0);
    CHECK(key.size() == 5);
    const std::string fact = "The pass key is " + key + ". Remember it. " + key + " is the pass key.";
    const std::size_t at = text.find(fact);
    REQUIRE(at != std::string::npos);
    CHECK(text[at - 1] == '\n');
    if (i == 0) CHECK(at == head.size());
    if (i == 2) CHECK(at + fact.size() == text.size());
    CHECK(text.find("\nThe grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n") !=
          std::string::npos);
    CHECK(env.decode(s.questions[0].tokens) == "\n\nWhat is the pass key?\n\nThe pass key is");
  }
}
