#include "test/support/task_fixture.hpp"

using namespace kvlab;
using test::TaskFixture;

TEST_CASE("repeated_tokens: copies of one draw behind BOS, ids in their range, another draw for each sample and seed") {
  const TaskFixture f("repeated_tokens", "llama-spm");
  const auto task = f.task({{"tokens", std::int64_t{50}},
                            {"repeats", std::int64_t{3}},
                            {"first_id", std::int64_t{100}},
                            {"ids", std::int64_t{40}},
                            {"samples", std::int64_t{2}}});
  const auto env = f.env(1);
  REQUIRE(task->samples(env) == 2);
  const TaskSample s = task->sample(0, env);
  const std::vector<int> bos = env.bos();
  REQUIRE(bos.size() == 1);
  REQUIRE(s.context.size() == 1 + 3 * 50);
  CHECK(s.context[0] == bos[0]);
  int lowest = 1 << 30, highest = 0;
  for (std::size_t i = 1; i < s.context.size(); ++i) {
    CHECK(s.context[i] == s.context[1 + (i - 1) % 50]);
    lowest = std::min(lowest, s.context[i]), highest = std::max(highest, s.context[i]);
  }
  CHECK(lowest >= 100);
  CHECK(highest < 140);
  CHECK(highest - lowest > 20);
  CHECK(task->sample(0, env).context == s.context);
  CHECK(task->sample(1, env).context != s.context);
  CHECK(task->sample(0, f.env(2)).context != s.context);
}
