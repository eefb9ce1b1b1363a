#include <algorithm>
#include <sstream>

#include "test/support/task_fixture.hpp"

using namespace kvlab;
using test::TaskFixture;

TEST_CASE("common_words: the references are the words that the list has most often") {
  const TaskFixture f("common_words");
  const auto env = f.env(2);
  for (const std::int64_t context : {1500, 5000}) {
    const TaskSample s = f.task({{"context", context}, {"common", std::int64_t{4}}})->sample(0, env);
    const std::string text = env.decode(s.context);
    std::map<std::string, int> counts;
    std::istringstream in(text.substr(text.rfind("\n1. ")));
    std::string number, word;
    for (int i = 1; in >> number >> word; ++i) {
      CHECK(number == std::to_string(i) + ".");
      ++counts[word];
    }
    CHECK(counts.size() > 20);
    for (const auto& [w, n] : counts) {
      const auto& common = s.questions[0].references;
      const bool often = std::find(common.begin(), common.end(), w) != common.end();
      CHECK(n == (context < 4096 ? (often ? 6 : 1) : (often ? 30 : 3)));
    }
    CHECK(env.decode(s.questions[0].tokens) ==
          "\nQuestion: What are the 4 most common words in the above list? Answer: The top 4 words that appear most "
          "often "
          "in the list are:");
  }
}
