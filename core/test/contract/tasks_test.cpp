// Promises of every task that generates prompts to a length.
#include <algorithm>

#include "support/contract.hpp"
#include "support/library_under_test.hpp"
#include "support/task_fixture.hpp"

using namespace kvlab;
using test::TaskFixture;

namespace {

std::vector<std::string> generated() {
  Registry registry(test::library_under_test());
  std::vector<std::string> out;
  for (const PluginInfo* p : registry.list(Role::task))
    if (test::under_test(*p) &&
        std::any_of(p->params.begin(), p->params.end(), [](const ParamSpec& s) { return s.name == "context"; }))
      out.push_back(p->name);
  if (test::on_cuda())
    out.clear(), test::skip("about tasks, which know no device: the suite on the CPU asks them");
  else if (out.empty())
    test::skip("about tasks with the parameter `context`: the library has none");
  return out;
}

// Tokens of the longest conversation of a sample.
int longest(const TaskSample& s) {
  int best = 0, here = 0;
  for (const TaskQuestion& q : s.questions) {
    if (!q.follows) here = static_cast<int>(s.context.size());
    here += static_cast<int>(q.tokens.size()) + q.max_new_tokens;
    best = std::max(best, here);
  }
  return best;
}

bool same(const TaskSample& a, const TaskSample& b) {
  return a.context == b.context && std::equal(a.questions.begin(), a.questions.end(), b.questions.begin(),
                                              b.questions.end(), [](const TaskQuestion& p, const TaskQuestion& q) {
                                                return p.tokens == q.tokens && p.references == q.references &&
                                                       p.max_new_tokens == q.max_new_tokens;
                                              });
}

}  // namespace

TEST_CASE("a generated prompt has exactly the tokens of its context", "[cpu]") {
  for (const std::string& name : generated())
    for (const char* vocabulary : {"gpt-2", "llama-spm"}) {
      const TaskFixture f(name, vocabulary);
      for (const std::int64_t context : {1400, 1401, 1402, 4096}) {
        CAPTURE(name, vocabulary, context);
        const auto task = f.task({{"context", context}});
        const TaskSample s = task->sample(task->samples(f.env(3)) - 1, f.env(3));
        INFO(
            "usual cause: pieces of the prompt are encoded one by one, or template and answer are not counted. "
            "PromptTask fills up to the length; encode_next() encodes text that follows other text.");
        CHECK(longest(s) == context);
        CHECK(test::is_utf8(f.env(3).decode(s.context)));
      }
    }
}

TEST_CASE("a generated prompt follows from seed and index alone", "[cpu]") {
  for (const std::string& name : generated()) {
    CAPTURE(name);
    const TaskFixture f(name);
    const std::map<std::string, ParamValue> given{{"context", std::int64_t{1500}}, {"samples", std::int64_t{3}}};
    const auto task = f.task(given), again = f.task(given);
    const TaskSample s = task->sample(1, f.env(5));
    again->sample(2, f.env(5));
    again->sample(0, f.env(8));
    INFO(
        "usual cause: a sample is drawn from a generator that earlier samples moved on, or from the index alone. Seed "
        "a "
        "generator of its own with env.seed() and the index.");
    CHECK(same(again->sample(1, f.env(5)), s));
    CHECK(!same(task->sample(2, f.env(5)), s));
    CHECK(!same(task->sample(1, f.env(6)), s));
  }
}

TEST_CASE("turns and questions of a generated task fit its context, or it takes none", "[cpu]") {
  for (const std::string& name : generated()) {
    CAPTURE(name);
    const TaskFixture f(name);
    const auto task = f.task({{"context", std::int64_t{3000}}});
    const auto env = f.env(2, 2, 2);
    INFO(
        "usual cause: the task makes one question whatever env.questions() says, or leaves room for one answer only. "
        "It "
        "makes as many, `follows` set by env.turns(), or refuses with Errc::config.");
    try {
      const TaskSample s = task->sample(0, env);
      CHECK(s.questions.size() == 4);
      CHECK((s.questions[1].follows && !s.questions[2].follows && s.questions[3].follows));
      CHECK(longest(s) == 3000);
    } catch (const Error& e) {
      CHECK(e.code() == Errc::config);
      CHECK(e.message().find("got 4 questions, wanted") == 0);
    }
  }
}

TEST_CASE("a context too short for a generated prompt is refused by its length", "[cpu]") {
  for (const std::string& name : generated()) {
    CAPTURE(name);
    const TaskFixture f(name);
    INFO("usual cause: the context is taken as it is; what has no room for template, question and answer is refused");
    CHECK_THROWS_WITH(f.task({{"context", std::int64_t{40}}})->sample(0, f.env(1)),
                      Catch::Contains("got context: 40, wanted"));
  }
}
