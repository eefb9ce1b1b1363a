#include "test/support/task_fixture.hpp"

using namespace kvlab;
using test::TaskFixture;

TEST_CASE("multikey: RULER's wording, one fact among four") {
  const TaskFixture f("multikey");
  const auto env = f.env(1);
  const TaskSample s = f.task({{"context", std::int64_t{600}}, {"depth", std::int64_t{3}}})->sample(0, env);
  const std::string text = env.decode(s.context), question = env.decode(s.questions[0].tokens);
  const std::string value = s.questions[0].references.at(0), what = "One of the special magic numbers for ";
  CHECK(text.rfind(
            "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you "
            "about the number afterwards.",
            0) == 0);
  std::size_t facts = 0, first = text.find(what);
  for (std::size_t at = first; at != std::string::npos; at = text.find(what, at + 1)) ++facts;
  CHECK(facts == 4);
  const std::string key = text.substr(first + what.size(), text.find(" is: ", first) - first - what.size());
  CHECK(text.find(what + key + " is: " + value + ".") == first);  // depth 0: the asked fact comes first
  CHECK(question == "\nWhat is the special magic number for " + key +
                        " mentioned in the provided text? The special magic "
                        "number for " +
                        key + " mentioned in the provided text is");
}

TEST_CASE("multikey: nothing but facts, of UUIDs") {
  const TaskFixture f("multikey");
  const auto env = f.env(1);
  const auto task = f.task({{"context", std::int64_t{2000}},
                            {"depth", std::int64_t{2}},
                            {"keys", std::int64_t{0}},
                            {"key", std::string("uuid")},
                            {"answer", std::string("uuid")},
                            {"max_new_tokens", std::int64_t{48}}});
  const TaskSample s = task->sample(1, env);
  const std::string text = env.decode(s.context), value = s.questions[0].references.at(0);
  CHECK(value.size() == 36);
  CHECK(text.size() - text.find(value) == 37);  // depth 1: the last fact
  std::size_t lines = 0;
  for (std::size_t at = text.find('\n'); at != std::string::npos; at = text.find('\n', at + 1))
    lines += text.compare(at, 36, "\nOne of the special magic uuids for ") == 0;
  CHECK(lines > 15);
  CHECK_THROWS_WITH(f.task({{"answer", std::string("uuid")}})->sample(0, env),
                    Catch::Contains("got max_new_tokens: 16, wanted at least"));
}
