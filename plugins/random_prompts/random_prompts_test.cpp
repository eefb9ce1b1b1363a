#include <kvlab/error.hpp>

#include <set>

#include "test/support/task_fixture.hpp"

using namespace kvlab;
using test::TaskFixture;

TEST_CASE("random_prompts: lengths are exact, drawn ones lie in their range, seeds differ") {
  const TaskFixture f("random_prompts");
  const auto task = f.task({{"prompt", std::int64_t{20}},
                            {"prompt_max", std::int64_t{30}},
                            {"answer", std::int64_t{5}},
                            {"samples", std::int64_t{50}}});
  const auto env = f.env(1), other = f.env(2);
  REQUIRE(task->samples(env) == 50);
  std::set<std::size_t> lengths;
  for (int i = 0; i < 50; ++i) {
    const TaskSample s = task->sample(i, env);
    lengths.insert(s.context.size());
    CHECK(s.context == task->sample(i, env).context);
    CHECK(s.context != task->sample(i, other).context);
    REQUIRE(s.questions.size() == 1);
    CHECK(s.questions[0].max_new_tokens == 5);
  }
  CHECK(*lengths.begin() >= 20);
  CHECK(*lengths.rbegin() <= 30);
  CHECK(lengths.size() > 5);
}

TEST_CASE("random_prompts: a file gives the lengths, a bad line is named") {
  const TaskFixture f("random_prompts");
  f.write("trace.csv", "# seconds, prompt, answer\n0.5, 7, 3\n\n1,12,4,x\n");
  const auto task = f.task({{"file", std::string("trace.csv")}});
  const auto env = f.env(1);
  REQUIRE(task->samples(env) == 2);
  CHECK(task->sample(0, env).context.size() == 7);
  CHECK(task->sample(0, env).questions[0].max_new_tokens == 3);
  CHECK(task->sample(1, env).context.size() == 12);
  CHECK(task->sample(1, env).questions[0].max_new_tokens == 4);
  for (const char* bad : {"1,2,3\n1,2\n", "1,2,3\n1\n", "1,2,3\n1,0,3\n", "1,2,3\n1,2,3x\n", "1,2,3\n1,,3\n"}) {
    CAPTURE(bad);
    f.write("bad.csv", bad);
    const auto broken = f.task({{"file", std::string("bad.csv")}});
    try {
      broken->samples(env);
      FAIL("no error");
    } catch (const Error& e) {
      CHECK(e.where() == "bad.csv:2");
    }
  }
  f.write("empty.csv", "# nothing\n");
  CHECK_THROWS_AS(f.task({{"file", std::string("empty.csv")}})->samples(env), Error);
}
