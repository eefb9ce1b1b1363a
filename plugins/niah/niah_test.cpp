#include <kvlab/error.hpp>

#include <cmath>

#include "test/support/task_fixture.hpp"

using namespace kvlab;
using test::TaskFixture;

namespace {

const std::string quarter_text = [] {  // 40 lines of one sentence, all different
  std::string s;
  for (int i = 0; i < 40; ++i) s += "This is line number " + std::to_string(i) + " of forty plain lines.\n";
  return s;
}();

int total(const TaskSample& s, std::size_t q) {
  return static_cast<int>(s.context.size() + s.questions[q].tokens.size()) + s.questions[q].max_new_tokens;
}

std::vector<std::size_t> all_of(const std::string& text, const std::string& part) {
  std::vector<std::size_t> out;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) out.push_back(at);
  return out;
}

}  // namespace

TEST_CASE("niah: every prompt has exactly the tokens of the context") {
  for (const char* vocabulary : {"gpt-2", "llama-spm"}) {
    const TaskFixture f("niah", vocabulary);
    for (const int context : {160, 161, 162, 163, 500, 1024, 3000}) {
      const auto task = f.task({{"context", std::int64_t{context}}, {"depth", std::int64_t{3}}});
      const auto env = f.env(7);
      REQUIRE(task->samples(env) == 3);
      for (int i = 0; i < 3; ++i) {
        const TaskSample s = task->sample(i, env);
        REQUIRE(s.questions.size() == 1);
        CHECK(total(s, 0) == context);
        CHECK(s.questions[0].max_new_tokens == 16);
      }
    }
  }
}

TEST_CASE("niah: the needle stands once, at a sentence's end nearest to its depth, and the question asks for it") {
  const TaskFixture f("niah");
  const auto task = f.task({{"context", std::int64_t{2048}}, {"depth", std::int64_t{5}}});
  const auto env = f.env(1);
  for (int i = 0; i < 5; ++i) {
    const TaskSample s = task->sample(i, env);
    const std::string text = env.decode(s.context), question = env.decode(s.questions[0].tokens);
    REQUIRE(s.questions[0].references.size() == 1);
    const std::string value = s.questions[0].references[0];
    CHECK(value.size() == 7);
    CHECK(all_of(text, value).size() == 1);
    CHECK(question.find(value) == std::string::npos);
    const std::size_t begin = text.find("One of the special magic numbers for "),
                      end = text.find(" is: " + value + ".");
    REQUIRE(begin != std::string::npos);
    REQUIRE(end != std::string::npos);
    const std::string key = text.substr(begin + 37, end - begin - 37);
    CHECK(question == "\nWhat is the special magic number for " + key +
                          " mentioned in the provided text? The special magic number "
                          "for " +
                          key + " mentioned in the provided text is");
    // The margin is the share of two of the haystack's longest sentences.
    const std::string intro = "I will quiz you about the number afterwards.";
    const std::size_t hay = text.find(intro) + intro.size();
    const double share = static_cast<double>(begin - hay) / static_cast<double>(text.size() - hay - 60);
    CHECK(std::abs(share - i / 4.0) < 0.06);
    CHECK(std::string(".!?\"')-").find(text[begin - 2]) != std::string::npos);
  }
  const std::string last = env.decode(task->sample(4, env).context);
  CHECK(last.substr(last.size() - 9, 1) == " ");
  CHECK(last.back() == '.');
  CHECK(last.find("One of the special") > last.size() - 80);  // 100 %: no text follows
}

TEST_CASE("niah: depth lies between the sentences of a known text") {
  const TaskFixture f("niah");
  f.write("hay.txt", quarter_text);
  // Every line has 11 tokens in GPT-2's vocabulary. The needle in the middle halves them.
  const auto task =
      f.task({{"haystack", std::string("hay.txt")}, {"context", std::int64_t{800}}, {"depth", std::int64_t{1}}});
  const auto env = f.env(3);
  const std::string text = env.decode(task->sample(0, env).context);
  const std::size_t needle = text.find("One of");
  const auto before = all_of(text.substr(0, needle), "This is"), after = all_of(text.substr(needle), "This is");
  CHECK(std::abs(static_cast<int>(before.size()) - static_cast<int>(after.size())) <= 1);
  CHECK(before.size() + after.size() > 50);  // the forty lines repeat
  const std::size_t end = text.find("number 39 of forty plain lines.");
  REQUIRE(end != std::string::npos);
  const std::size_t next = text.find("This is", end);
  CHECK(text.compare(next, 22, "This is line number 0 ") == 0);
}

TEST_CASE("niah: a prompt follows from seed and index alone") {
  const TaskFixture f("niah");
  const auto task = f.task({{"context", std::int64_t{400}}, {"samples", std::int64_t{2}}, {"depth", std::int64_t{2}}});
  const auto again = f.task({{"context", std::int64_t{400}}, {"samples", std::int64_t{2}}, {"depth", std::int64_t{2}}});
  REQUIRE(task->samples(f.env(5)) == 4);
  const TaskSample s = task->sample(3, f.env(5));
  again->sample(0, f.env(9));
  CHECK(again->sample(3, f.env(5)).context == s.context);
  CHECK(again->sample(3, f.env(5)).questions[0].references == s.questions[0].references);
  CHECK(task->sample(2, f.env(5)).context != s.context);
  CHECK(task->sample(3, f.env(6)).questions[0].references != s.questions[0].references);
}

TEST_CASE("niah: several questions over one context, together and one at a time") {
  const TaskFixture f("niah");
  const auto together = f.task({{"context", std::int64_t{900}}});
  const auto env = f.env(2, 3);
  const TaskSample s = together->sample(1, env);
  REQUIRE(s.questions.size() == 3);
  int longest = 0;
  const std::string text = env.decode(s.context);
  for (std::size_t q = 0; q < 3; ++q) {
    const std::string question = env.decode(s.questions[q].tokens), answer = s.questions[q].references[0];
    CHECK(all_of(text, answer).size() == 1);
    const std::size_t begin = question.find(" for ") + 5;
    const std::string key = question.substr(begin, question.find(" mentioned") - begin);
    CHECK(text.find("One of the special magic numbers for " + key + " is: " + answer + ".") != std::string::npos);
    longest = std::max(longest, total(s, q));
    const auto alone =
        f.task({{"context", std::int64_t{900}}, {"needles", std::int64_t{3}}, {"ask", static_cast<std::int64_t>(q)}});
    const TaskSample one = alone->sample(1, f.env(2));
    REQUIRE(one.questions.size() == 1);
    CHECK(one.context == s.context);
    CHECK(one.questions[0].tokens == s.questions[q].tokens);
    CHECK(one.questions[0].references == s.questions[q].references);
  }
  CHECK(longest == 900);
}

TEST_CASE("niah: needles follow at even distances, past the end from the beginning") {
  const TaskFixture f("niah");
  const auto task = f.task({{"context", std::int64_t{2048}}, {"depth", std::int64_t{5}}});
  const auto env = f.env(2, 3);
  const std::vector<std::vector<double>> wanted{
      {0, 1 / 3., 2 / 3.}, {0.25, 0.25 + 1 / 3., 0.25 + 2 / 3.}, {0.5, 0.5 + 1 / 3., 1 / 6.}, {}, {1, 1 / 3., 2 / 3.}};
  for (const int i : {0, 1, 2, 4}) {
    CAPTURE(i);
    const TaskSample s = task->sample(i, env);
    const std::string text = env.decode(s.context), intro = "I will quiz you about the number afterwards.";
    const std::size_t hay = text.find(intro) + intro.size();
    for (std::size_t q = 0; q < 3; ++q) {
      const auto at = static_cast<double>(text.find(s.questions[q].references[0]) - hay);
      CHECK(at / static_cast<double>(text.size() - hay) == Approx(wanted[static_cast<std::size_t>(i)][q]).margin(0.08));
    }
  }
}

TEST_CASE("niah: words as answers, no template, own wording") {
  const TaskFixture f("niah");
  const auto task = f.task({{"context", std::int64_t{300}},
                            {"answer", std::string("word")},
                            {"chat", false},
                            {"intro", std::string("Read.")},
                            {"needle", std::string("{key}: {value} ({kind}, {other})")},
                            {"question_text", std::string(" So {key}?")},
                            {"answer_opening", std::string()}});
  const auto env = f.env(4);
  const TaskSample s = task->sample(2, env);
  const std::string text = env.decode(s.context), value = s.questions[0].references[0];
  CHECK(text.rfind("Read.\n", 0) == 0);
  CHECK(text.find(": " + value + " (word, {other})") != std::string::npos);
  CHECK(env.decode(s.questions[0].tokens).rfind(" So ", 0) == 0);
  CHECK(value.find(' ') != std::string::npos);
}

TEST_CASE("niah: a haystack of long characters is never cut inside one") {
  const TaskFixture f("niah");
  std::string text;
  for (int i = 0; i < 60; ++i) text += "\xe6\xbc\xa2\xe5\xad\x97\xf0\x9f\x8d\xa3\xc3\xa9 \xe0\xa4\xa8\xe0\xa4\xae. ";
  f.write("unicode.txt", text);
  const auto env = f.env(1);
  for (std::int64_t context = 200; context < 230; ++context) {
    const auto task =
        f.task({{"haystack", std::string("unicode.txt")}, {"context", context}, {"depth", std::int64_t{1}}});
    const TaskSample s = task->sample(0, env);
    CHECK(total(s, 0) == context);
    CHECK(test::is_utf8(env.decode(s.context)));
  }
}

TEST_CASE("niah: what cannot be built is said") {
  const TaskFixture f("niah");
  f.write("empty.txt", " \n \n");
  const auto env = f.env(1);
  CHECK_THROWS_WITH(f.task({{"context", std::int64_t{60}}})->sample(0, env),
                    Catch::Contains("got context: 60, wanted at least ") && Catch::Contains("question and answer"));
  CHECK_THROWS_WITH(f.task({{"haystack", std::string("empty.txt")}})->sample(0, env),
                    Catch::Contains("file without text") && Catch::Contains("empty.txt"));
  CHECK_THROWS_WITH(f.task({{"haystack", std::string("no.txt")}})->sample(0, env), Catch::Contains("no.txt"));
  CHECK_THROWS_WITH(f.task({{"needles", std::int64_t{2}}})->sample(0, f.env(1, 3)),
                    Catch::Contains("needles 0 to 2, wanted less than needles: 2"));
  CHECK_THROWS_WITH(f.task({{"needle", std::string("no answer")}}), Catch::Contains("{value}"));
  CHECK_THROWS_WITH(f.task({})->sample(0, f.env(1, 5000)), Catch::Contains("5000 needles, wanted at most 1000"));
  // The smallest context that the message names must do.
  try {
    f.task({{"context", std::int64_t{60}}})->sample(0, env);
  } catch (const Error& e) {
    CHECK(e.code() == Errc::config);
    const auto least = std::stoll(e.message().substr(e.message().find("at least ") + 9));
    CHECK(total(f.task({{"context", least}})->sample(0, env), 0) == least);
  }
}
