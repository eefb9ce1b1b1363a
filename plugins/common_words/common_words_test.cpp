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

TEST_CASE("common_words: RULER's worked example before the list, or none") {
  const TaskFixture f("common_words");
  const auto env = f.env(2);
  const std::string intro = "Below is a numbered list of words.", answers = "in the list are:";
  for (const std::int64_t context : {2000, 5000}) {
    const TaskSample s = f.task({{"context", context}})->sample(0, env);
    const std::string text = env.decode(s.context);
    const std::size_t begin = text.find("\n1. "), question = text.find("\nQuestion: "), last = text.rfind(intro);
    REQUIRE((begin < question && question < last));
    const std::string answer = text.substr(text.find(answers) + answers.size(), std::string::npos);
    std::map<std::string, int> counts;
    std::istringstream in(text.substr(begin, question - begin)), top(answer);
    std::string number, word;
    while (in >> number >> word) ++counts[word];
    CHECK(counts.size() == (context < 4096 ? 20 : 40));
    for (int i = 1; i <= 10; ++i) {
      REQUIRE(top >> number >> word);
      CHECK(number == std::to_string(i) + ".");
      CHECK(counts[word] == (context < 4096 ? 3 : 10));
      counts.erase(word);
    }
    for (const auto& [w, n] : counts) CHECK(n == (context < 4096 ? 1 : 3));
    const TaskSample none = f.task({{"context", context}, {"examples", std::int64_t{0}}})->sample(0, env);
    CHECK(env.decode(none.context).rfind(intro) == env.decode(none.context).find(intro));
  }
}

TEST_CASE("common_words: more words than tokens are refused before any is made") {
  const TaskFixture f("common_words");
  const auto task =
      f.task({{"context", std::int64_t{512}}, {"common", std::int64_t{1000}}, {"times", std::int64_t{10000}}});
  CHECK_THROWS_WITH(task->sample(0, f.env(1)),
                    Catch::Contains("got context: 512, wanted at least 10000000: so many words"));
}
