#include "test/support/task_fixture.hpp"

using namespace kvlab;
using test::TaskFixture;

TEST_CASE("qa: RULER's format, the answer in one of the documents") {
  const TaskFixture f("qa");
  const auto env = f.env(2);
  const TaskSample s = f.task({{"context", std::int64_t{1200}}})->sample(0, env);
  const std::string text = env.decode(s.context), question = env.decode(s.questions[0].tokens);
  const std::string rule =
      "Answer the question based on the given documents. Only give me the answer and do not output any other words.";
  CHECK(text.rfind(rule + "\n\nThe following are given documents.\n\n", 0) == 0);
  CHECK(text.find("\nDocument 1:\n") < text.find("\n\nDocument 2:\n"));
  CHECK(question.rfind("\n\n" + rule + "\n\nQuestion: ", 0) == 0);
  CHECK(question.substr(question.size() - 8) == " Answer:");
  CHECK(text.find(s.questions[0].references.at(0)) != std::string::npos);
}

TEST_CASE("qa: documents of a file, each sample another question") {
  const TaskFixture f("qa");
  f.write("squad.jsonl",
          R"({"context": "Ann sails boats.", "question": "Who sails?", "answers": ["Ann", "ann"]}
{"context": "Bob walks home.", "question": "Who walks?", "answers": "Bob"}
{"context": "Ann sails boats.", "question": "What does Ann sail?", "answers": ["boats"]})");
  const auto env = f.env(1);
  const auto task =
      f.task({{"data", std::string("squad.jsonl")}, {"context", std::int64_t{200}}, {"samples", std::int64_t{3}}});
  std::string questions;
  for (int i = 0; i < 3; ++i) {
    const TaskSample s = task->sample(i, env);
    const std::string text = env.decode(s.context);
    CHECK(text.find("Ann sails boats.") != std::string::npos);
    CHECK(text.find("Bob walks home.") != std::string::npos);
    CHECK(text.find("Document 3") == std::string::npos);  // two contexts make two documents
    questions += env.decode(s.questions[0].tokens);
  }
  for (const char* q : {"Who sails?", "Who walks?", "What does Ann sail?"})
    CHECK(questions.find(q) != std::string::npos);
  for (const char* answers : {R"("")", R"(["a", " "])", R"({"text": ["a"]})"}) {
    f.write("bad.jsonl", R"({"context": "c", "question": "q", "answers": )" + std::string(answers) + "}");
    CHECK_THROWS_WITH(f.task({{"data", std::string("bad.jsonl")}})->sample(0, env),
                      Catch::Contains("bad.jsonl: record 1: got") && Catch::Contains("'answers'"));
  }
  f.write("bad.jsonl", R"({"context": "c", "answers": ["a"]})");
  CHECK_THROWS_WITH(f.task({{"data", std::string("bad.jsonl")}})->sample(0, env),
                    Catch::Contains("bad.jsonl: record 1") && Catch::Contains("'question'"));
}
