#include "test/support/task_fixture.hpp"

using namespace kvlab;
using test::TaskFixture;

namespace {

std::string counted(int words) {
  std::string s = "0";
  for (int i = 1; i < words; ++i) s += " " + std::to_string(i % 10);
  return s;
}

}  // namespace

TEST_CASE("text: the prefix, then what is forced") {
  const TaskFixture f("text");
  f.write("digits.txt", counted(100));  // " 7" is one token
  const auto task =
      f.task({{"file", std::string("digits.txt")}, {"prefix", std::int64_t{6}}, {"forced", std::int64_t{4}}});
  const auto env = f.env(1);
  REQUIRE(task->samples(env) == 1);
  const TaskSample s = task->sample(0, env);
  CHECK(env.decode(s.context) == "0 1 2 3 4 5");
  REQUIRE(s.questions.size() == 1);
  CHECK(s.questions[0].tokens.empty());
  CHECK(env.decode(s.questions[0].forced) == " 6 7 8 9");
  CHECK(s.questions[0].max_new_tokens == 4);
}

TEST_CASE("text: samples begin at even distances, the last one ends with the text") {
  const TaskFixture f("text");
  f.write("digits.txt", counted(100));
  const auto task = f.task({{"file", std::string("digits.txt")},
                            {"prefix", std::int64_t{6}},
                            {"forced", std::int64_t{4}},
                            {"samples", std::int64_t{4}}});
  const auto env = f.env(1);
  CHECK(env.decode(task->sample(0, env).context) == "0 1 2 3 4 5");
  CHECK(env.decode(task->sample(1, env).context) == " 0 1 2 3 4 5");  // token 30
  CHECK(env.decode(task->sample(3, env).questions[0].forced) == " 6 7 8 9");
}

TEST_CASE("text: BOS is the first token of the prefix where the model wants one") {
  const TaskFixture f("text", "llama-spm");
  f.write("a.txt", "one two three four five six");
  const auto task = f.task({{"file", std::string("a.txt")}, {"prefix", std::int64_t{3}}, {"forced", std::int64_t{2}}});
  const TaskSample s = task->sample(0, f.env(1));
  REQUIRE(s.context.size() == 3);
  CHECK(s.context[0] == 1);
  CHECK(f.env(1).decode({s.context[1], s.context[2]}) == "one two");
}

TEST_CASE("text: bos puts one BOS in front of every sample, and the counts stay") {
  // gpt-2's BOS is 50256, and its tokenizer adds none. llama-spm's BOS is 1, and its tokenizer adds it.
  for (const auto& [vocabulary, bos] : {std::pair{"gpt-2", 50256}, {"llama-spm", 1}}) {
    const TaskFixture f("text", vocabulary);
    f.write("digits.txt", counted(100));
    const auto env = f.env(1);
    const std::vector<int> text = env.encode(counted(100));
    const std::map<std::string, ParamValue> given{{"file", std::string("digits.txt")},
                                                  {"prefix", std::int64_t{6}},
                                                  {"forced", std::int64_t{4}},
                                                  {"samples", std::int64_t{3}},
                                                  {"bos", true}};
    const auto task = f.task(given);
    REQUIRE(task->samples(env) == 3);
    const auto spare = static_cast<std::ptrdiff_t>(text.size()) - 5 - 4;  // BOS takes one place of the prefix
    for (int i = 0; i < 3; ++i) {
      CAPTURE(vocabulary, i);
      const TaskSample s = task->sample(i, env);
      const auto first = text.begin() + spare * i / 2;
      REQUIRE(s.context.size() == 6);
      CHECK(s.context[0] == bos);
      CHECK(std::equal(s.context.begin() + 1, s.context.end(), first));
      CHECK(s.questions[0].forced == std::vector<int>(first + 5, first + 9));
    }
  }
}

TEST_CASE("text: bos without a BOS token in the tokenizer is refused before any sample") {
  const TaskFixture f("text");
  f.write("none.json", R"({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false}})");
  const ModelTaskEnv env(tokenizer_from_json(f.path("none.json"), {}), ".", 1, 1);
  CHECK(env.bos().empty());
  const auto task = f.task({{"bos", true}});
  CHECK_THROWS_WITH(task->samples(env), Catch::Contains("got bos: true for a tokenizer that has no BOS token"));
  CHECK_THROWS_WITH(task->sample(0, env), Catch::Contains("wanted bos: false"));
}

TEST_CASE("text: the bundled text is the default") {
  const TaskFixture f("text");
  const TaskSample s = f.task({{"prefix", std::int64_t{8}}})->sample(0, f.env(1));
  CHECK(f.env(1).decode(s.context).rfind("\"Are we rising again?\"", 0) == 0);
}

TEST_CASE("text: what cannot be built is said") {
  const TaskFixture f("text");
  f.write("short.txt", counted(9));
  f.write("empty.txt", "");
  const auto env = f.env(1);
  const auto made = [&](const char* file, std::int64_t samples) {
    return f.task(
        {{"file", std::string(file)}, {"prefix", std::int64_t{6}}, {"forced", std::int64_t{4}}, {"samples", samples}});
  };
  CHECK_THROWS_WITH(made("short.txt", 1)->sample(0, env),
                    Catch::Contains("short.txt: got a text of 9 tokens, wanted at least 10"));
  CHECK_THROWS_WITH(made("empty.txt", 3)->sample(0, env), Catch::Contains("got a file without text"));
  CHECK_THROWS_WITH(made("none.txt", 1)->sample(0, env), Catch::Contains("none.txt"));
  CHECK_THROWS_WITH(made("short.txt", 1)->sample(0, f.env(1, 2)), Catch::Contains("got questions: 2, wanted 1"));
}
