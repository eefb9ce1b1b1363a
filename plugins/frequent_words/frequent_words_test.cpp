#include <algorithm>
#include <sstream>

#include "test/support/task_fixture.hpp"

using namespace kvlab;
using test::TaskFixture;

TEST_CASE("frequent_words: frequencies fall with the square of the rank") {
  const TaskFixture f("frequent_words");
  const auto env = f.env(2);
  const TaskSample s = f.task({{"context", std::int64_t{2000}}})->sample(0, env);
  const std::string text = env.decode(s.context);
  std::map<std::string, double> counts;
  std::istringstream in(text.substr(text.find(" coded words.") + 13));
  for (std::string word; in >> word;) ++counts[word];
  const auto& top = s.questions[0].references;
  REQUIRE(top.size() == 3);
  for (const auto& [w, n] : counts)
    if (w != "..." && w.size() == 6 && std::find(top.begin(), top.end(), w) == top.end()) CHECK(n < counts[top[2]]);
  CHECK(counts["..."] / counts[top[0]] == Approx(4).epsilon(0.05));
  CHECK(counts["..."] / counts[top[1]] == Approx(9).epsilon(0.1));
  CHECK(counts["..."] / counts[top[2]] == Approx(16).epsilon(0.15));
  CHECK_THROWS_WITH(f.task({{"context", std::int64_t{130}}})->sample(0, env), Catch::Contains("are not apart"));
}
