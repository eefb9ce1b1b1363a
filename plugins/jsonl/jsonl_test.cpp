
#include <nlohmann/json.hpp>

#include "test/support/task_fixture.hpp"

using namespace kvlab;
using test::TaskFixture;
using Given = std::map<std::string, ParamValue>;

namespace {

const char* const longbench =
    R"({"input": "Who sails?", "context": "Ann sails. Bob walks.", "answers": ["Ann", "ann"], "length": 4, "all_classes": null})"
    "\n\r\n"
    R"({"input": "Who walks?", "context": "Ann sails. Bob walks.", "answers": ["Bob"], "length": 4})"
    "\n"
    R"({"input": "\u00bfQui\u00e9n? \ud83c\udf63", "context": "漢字 {not a field}", "answers": "née", "length": 2})";

// A header as datasets/convert.py writes it, with `changes` on top. null takes a key away.
std::string header(const nlohmann::json& changes = nlohmann::json::object()) {
  nlohmann::json keys = {{"schema", 1},         {"prompt", "Read.{context}"}, {"question_text", " Q:{input}"},
                         {"records", 1},        {"answer_opening", " A:"},    {"references", "gold"},
                         {"metric", "rouge_l"}, {"max_new_tokens", 7},        {"chat", false},
                         {"truncate", "middle"}};
  keys.merge_patch(changes);
  return nlohmann::json{{"kvlab_dataset", keys}}.dump() + "\n";
}

const char* const converted = R"({"context": " 0 1 2 3 4 5 6 7 8 9", "input": " why", "gold": ["x"], "answers": ["y"]})"
                              "\n";

Given with(Given more) {
  more.emplace("data", std::string("data.jsonl"));
  return more;
}

}  // namespace

TEST_CASE("jsonl: LongBench's fields are the defaults") {
  const TaskFixture f("jsonl");
  f.write("data.jsonl", longbench);
  const auto task = f.task(with({}));
  const auto env = f.env(1);
  CHECK(task->metric() == "f1");
  REQUIRE(task->samples(env) == 3);
  const TaskSample s = task->sample(0, env);
  CHECK(env.decode(s.context) == "Ann sails. Bob walks.\n");
  REQUIRE(s.questions.size() == 1);
  CHECK(env.decode(s.questions[0].tokens) == "\nWho sails?\n");
  CHECK(s.questions[0].references == std::vector<std::string>{"Ann", "ann"});
  CHECK(s.questions[0].record->at("length") == std::vector<std::string>{"4"});
  CHECK(s.questions[0].max_new_tokens == 64);
  const TaskSample u = task->sample(2, env);
  CHECK(env.decode(u.context) == "漢字 {not a field}\n");
  CHECK(env.decode(u.questions[0].tokens) == "\n¿Quién? 🍣\n");
  CHECK(u.questions[0].references == std::vector<std::string>{"née"});
}

TEST_CASE("jsonl: numbers and truth values count as text") {
  const TaskFixture f("jsonl");
  f.write("data.jsonl", R"({"context": 12, "input": 7, "answers": [7, 0.5, true]})"
                        "\n"
                        R"({"context": false, "input": null, "answers": 8})");
  const auto task = f.task(with({}));
  const auto env = f.env(1);
  REQUIRE(task->samples(env) == 2);
  const TaskSample first = task->sample(0, env), second = task->sample(1, env);
  CHECK(env.decode(first.context) == "12\n");
  CHECK(env.decode(first.questions[0].tokens) == "\n7\n");
  CHECK(first.questions[0].references == std::vector<std::string>{"7", "0.5", "true"});
  CHECK(env.decode(second.context) == "false\n");
  CHECK(env.decode(second.questions[0].tokens) == "\n\n");
  CHECK(second.questions[0].references == std::vector<std::string>{"8"});
}

TEST_CASE("jsonl: templates") {
  const TaskFixture f("jsonl");
  f.write("data.jsonl", R"([{"q": "x", "list": ["one", "two"], "n": 3, "flag": true, "deep": {"a": [1]}, "a": "y"}])");
  const auto env = f.env(1);
  const auto prompt = [&](const std::string& text) {
    return env.decode(
        f.task(with({{"prompt", text}, {"question_text", std::string()}, {"references", std::string("a")}}))
            ->sample(0, env)
            .context);
  };
  CHECK(prompt("{q}") == "x");
  CHECK(prompt("{{{q}}} {{}} {list}.") == "{x} {} one\ntwo.");
  CHECK(prompt("{n} {flag} {deep}") == "3 true {\"a\":[1]}");
  const auto s = f.task(with({{"prompt", std::string("{q}")},
                              {"question_text", std::string()},
                              {"answer_opening", std::string(" Answer {n}:")},
                              {"references", std::string("list")},
                              {"max_new_tokens", std::int64_t{5}}}))
                     ->sample(0, env);
  CHECK(env.decode(s.questions[0].tokens) == " Answer 3:");
  CHECK(s.questions[0].references == std::vector<std::string>{"one", "two"});
  CHECK(s.questions[0].max_new_tokens == 5);
}

TEST_CASE("jsonl: several questions over one context are neighbours with the same prompt") {
  const TaskFixture f("jsonl");
  f.write("data.jsonl", longbench);
  const auto task = f.task(with({}));
  const auto env = f.env(1, 3);
  REQUIRE(task->samples(env) == 2);
  const TaskSample s = task->sample(0, env);
  REQUIRE(s.questions.size() == 2);
  const auto alone = f.task(with({}));
  for (int i = 0; i < 2; ++i) {
    const TaskSample one = alone->sample(i, f.env(1));
    CHECK(one.context == s.context);
    CHECK(one.questions[0].tokens == s.questions[static_cast<std::size_t>(i)].tokens);
    CHECK(one.questions[0].references == s.questions[static_cast<std::size_t>(i)].references);
  }
  CHECK(task->sample(1, env).questions.size() == 1);
}

TEST_CASE("jsonl: turns are neighbours that follow each other, and count as one conversation") {
  const TaskFixture f("jsonl");
  f.write("data.jsonl", longbench);
  const auto task = f.task(
      with({{"limit", std::int64_t{1}}, {"max_new_tokens", std::int64_t{4}}, {"max_context", std::int64_t{22}}}));
  const auto env = f.env(1, 1, 2);
  CHECK_THROWS_WITH(task->sample(0, env), Catch::Contains("tokens of template, prompt and longest answer"));
  const TaskSample s = f.task(with({{"max_context", std::int64_t{200}}}))->sample(0, env);
  REQUIRE(s.questions.size() == 2);
  CHECK((!s.questions[0].follows && s.questions[1].follows));
  CHECK(f.task(with({{"max_new_tokens", std::int64_t{4}}, {"max_context", std::int64_t{22}}}))
            ->sample(0, f.env(1, 2))
            .questions.size() == 2);
}

TEST_CASE("jsonl: limit and shuffle") {
  const TaskFixture f("jsonl");
  std::string data;
  for (int i = 0; i < 50; ++i) data += R"({"context": "c", "input": "i", "answers": [")" + std::to_string(i) + "\"]}\n";
  f.write("data.jsonl", data);
  const auto order = [&](Given given, std::uint64_t seed) {
    const auto task = f.task(with(std::move(given)));
    const auto env = f.env(seed);
    std::vector<int> out;
    for (int i = 0; i < task->samples(env); ++i)
      out.push_back(std::stoi(task->sample(i, env).questions[0].references[0]));
    return out;
  };
  CHECK(order({{"limit", std::int64_t{3}}}, 1) == std::vector<int>{0, 1, 2});
  CHECK(order({{"limit", std::int64_t{99}}}, 1).size() == 50);
  const auto mixed = order({{"shuffle", true}}, 1);
  CHECK(mixed == order({{"shuffle", true}}, 1));
  CHECK(mixed != order({{"shuffle", true}}, 2));
  CHECK(mixed != order({}, 1));
  auto sorted = mixed;
  std::sort(sorted.begin(), sorted.end());
  CHECK(sorted == order({}, 1));
  CHECK(order({{"shuffle", true}, {"limit", std::int64_t{4}}}, 1) ==
        std::vector<int>(mixed.begin(), mixed.begin() + 4));
}

TEST_CASE("jsonl: a long prompt loses its middle") {
  const TaskFixture f("jsonl");
  f.write("data.jsonl", R"({"context": " 0 1 2 3 4 5 6 7 8 9", "input": " why", "answers": "x"})");
  const auto env = f.env(1);
  const auto made = [&](std::int64_t most, const char* truncate) {
    return f.task(with({{"prompt", std::string("{context}")},
                        {"question_text", std::string("{input}")},
                        {"max_new_tokens", std::int64_t{2}},
                        {"max_context", most},
                        {"truncate", std::string(truncate)}}));
  };
  CHECK(env.decode(made(8, "middle")->sample(0, env).context) == " 0 1 2 8 9");  // 5 of prompt, 1 question, 2 answer
  CHECK(env.decode(made(7, "middle")->sample(0, env).context) == " 0 1 8 9");
  CHECK(env.decode(made(4, "middle")->sample(0, env).context) == " 0");
  CHECK(env.decode(made(13, "middle")->sample(0, env).context) == " 0 1 2 3 4 5 6 7 8 9");
  CHECK(env.decode(made(13, "none")->sample(0, env).context) == " 0 1 2 3 4 5 6 7 8 9");
  CHECK_THROWS_WITH(made(12, "none")->sample(0, env), Catch::Contains("data.jsonl: record 1: got 13 tokens") &&
                                                          Catch::Contains("at most max_context: 12"));
  CHECK_THROWS_WITH(made(3, "middle")->sample(0, env),
                    Catch::Contains("record 1: got max_context: 3, wanted more than"));
  CHECK_THROWS_WITH(f.task(with({{"truncate", std::string("middle")}})), Catch::Contains("without max_context"));
}

TEST_CASE("jsonl: a header's settings hold where the entry gives none") {
  const TaskFixture f("jsonl");
  f.write("data.jsonl", header() + converted);
  const auto env = f.env(1);
  const auto made = [&](Given given) {
    const auto task = f.task(with(std::move(given)));
    REQUIRE(task->samples(env) == 1);
    return std::pair(task->sample(0, env), task->metric());
  };
  const auto [s, metric] = made({});
  CHECK(env.decode(s.context) == "Read. 0 1 2 3 4 5 6 7 8 9");
  CHECK(env.decode(s.questions[0].tokens) == " Q: why A:");
  CHECK(s.questions[0].references == std::vector<std::string>{"x"});
  CHECK(s.questions[0].max_new_tokens == 7);
  CHECK(metric == "rouge_l");

  const auto [own, own_metric] = made(
      {{"references", std::string("answers")}, {"max_new_tokens", std::int64_t{64}}, {"question_text", std::string()}});
  CHECK(env.decode(own.context) == env.decode(s.context));
  CHECK(env.decode(own.questions[0].tokens) == " A:");
  CHECK(own.questions[0].references == std::vector<std::string>{"y"});
  CHECK(own.questions[0].max_new_tokens == 64);
  CHECK(own_metric == "rouge_l");  // an entry's `metric` is core's to see
}

TEST_CASE("jsonl: a prompt of the entry's own replaces the header's whole template") {
  const TaskFixture f("jsonl");
  f.write("data.jsonl", header() + converted);
  const auto env = f.env(1);
  const TaskSample s = f.task(with({{"prompt", std::string("Mine.{context}")}}))->sample(0, env);
  CHECK(env.decode(s.context) == "Mine. 0 1 2 3 4 5 6 7 8 9");
  CHECK(env.decode(s.questions[0].tokens) == "\n why\n");
}

TEST_CASE("jsonl: the header's truncation and chat template, unless the entry says otherwise") {
  const TaskFixture f("jsonl");
  f.write("data.jsonl",
          header({{"prompt", "{context}"}, {"question_text", "{input}"}, {"answer_opening", ""}}) + converted);
  const auto env = f.env(1);
  const auto made = [&](const char* truncate) {
    return f.task(with({{"max_context", std::int64_t{13}}, {"truncate", std::string(truncate)}}));
  };
  CHECK(env.decode(made("auto")->sample(0, env).context) == " 0 1 2 8 9");  // 1 of question and 7 of answer: 5 stay
  CHECK_THROWS_WITH(made("none")->sample(0, env), Catch::Contains("data.jsonl: record 1: got 18 tokens"));

  const std::string chatml =
      "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
      "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
  const std::shared_ptr<const Tokenizer> tokenizer =
      tokenizer_from_json(test::source_root() / "datasets/models/recall/tokenizer.json", {-1, {}, chatml});
  const ModelTaskEnv chats(tokenizer, f.path("."), 1, 1);
  const auto open = chats.chat_open();
  REQUIRE(!open.empty());
  const auto opened = [&](bool chat, const char* given) {
    f.write("data.jsonl", header({{"chat", chat}, {"prompt", "{context}"}}) + converted);
    const auto context = f.task(with({{"chat", std::string(given)}}))->sample(0, chats).context;
    return context.size() > open.size() && std::equal(open.begin(), open.end(), context.begin());
  };
  CHECK(!opened(false, "auto"));
  CHECK(opened(true, "auto"));
  CHECK(opened(false, "true"));
  CHECK(!opened(true, "false"));
}

TEST_CASE("jsonl: stop texts of the header, a record's own in their place, and none with stops: false") {
  const TaskFixture f("jsonl");
  const auto env = f.env(1);
  auto own = nlohmann::json::parse(converted);
  own["stop"] = {"own"};
  f.write("data.jsonl", header({{"records", 2}, {"stop", {"\n\nQ:", "end"}}}) + converted + own.dump() + "\n");
  const auto stops = [&](Given given, int sample) {
    const auto task = f.task(with(std::move(given)));
    REQUIRE(task->samples(env) == 2);
    const auto record = task->sample(sample, env).questions[0].record;
    const auto found = record->find("stop");
    return found == record->end() ? std::vector<std::string>() : found->second;
  };
  CHECK(stops({}, 0) == std::vector<std::string>{"\n\nQ:", "end"});
  CHECK(stops({}, 1) == std::vector<std::string>{"own"});
  CHECK(stops({{"stops", false}}, 0).empty());
  CHECK(stops({{"stops", false}}, 1).empty());
  f.write("data.jsonl", header({{"records", 2}, {"stop", nlohmann::json::array()}}) + converted + own.dump() + "\n");
  CHECK(stops({}, 0).empty());
  CHECK(stops({}, 1) == std::vector<std::string>{"own"});
  f.write("data.jsonl", header({{"stop", "text"}}) + converted);
  CHECK_THROWS_WITH(f.task(with({}))->samples(env),
                    Catch::Contains("data.jsonl:1: got a value of the type string as 'kvlab_dataset.stop'"));
  f.write("data.jsonl", converted + (own["stop"] = {""}, own.dump()));
  CHECK_THROWS_WITH(f.task(with({}))->samples(env), Catch::Contains("data.jsonl:2: got a list with an empty text"));
}

TEST_CASE("jsonl: a header that is wrong is refused, and so is a file that lost records") {
  const TaskFixture f("jsonl");
  const auto env = f.env(1);
  const auto fails = [&](const std::string& data, const std::string& message) {
    f.write("data.jsonl", data);
    CHECK_THROWS_WITH(f.task(with({}))->samples(env), Catch::Contains("data.jsonl: " + message));
  };
  for (const char* key : {"schema", "prompt", "question_text", "answer_opening", "references", "metric",
                          "max_new_tokens", "chat", "truncate", "records"})
    fails(header({{key, nullptr}}) + converted, std::string("got nothing as '") + key + "' of the header");
  fails(header({{"schema", 2}}) + converted, "got 2 as 'schema' of the header, wanted 1");
  fails(header({{"prompt", ""}}) + converted, "got an empty text as 'prompt' of the header");
  fails(header({{"metric", nlohmann::json::array()}}) + converted, "got no text as 'metric' of the header");
  fails(header({{"max_new_tokens", "7 or so"}}) + converted, "got '7 or so' as 'max_new_tokens' of the header");
  fails(header({{"max_new_tokens", 0}}) + converted, "got '0' as 'max_new_tokens' of the header");
  fails(header({{"chat", "maybe"}}) + converted, "got 'maybe' as 'chat' of the header, wanted true or false");
  fails(header({{"truncate", "left"}}) + converted, "got 'left' as 'truncate' of the header, wanted none or middle");
  fails(header({{"records", 3}}) + converted, "got 1 records, wanted the header's 3");
  fails(header(), "got 0 records, wanted the header's 1");
  fails(header({{"records", 2}}) + converted + header(), "record 2: got a second header");
  fails(converted + header(), "record 2: got a second header");
  f.write("data.jsonl", header({{"prompt", "{nothing}"}}) + converted);
  CHECK_THROWS_WITH(f.task(with({}))->samples(env), Catch::Contains("data.jsonl: record 1: got no field 'nothing'"));
}

TEST_CASE("jsonl: records that were edited after their conversion are refused") {
  const TaskFixture f("jsonl");
  const auto env = f.env(1);
  const auto samples = [&](const std::string& data) {
    f.write("data.jsonl", data);
    return f.task(with({}))->samples(env);
  };
  const auto given = [](const std::string& hash) { return header({{"records_sha256", hash}}); };
  const std::string hash = "5d88fd099a613193008429f6c0c33b7cde8e13d6fafaab762dccf7d8eb3dfc36";
  CHECK(samples(given(hash) + converted) == 1);
  std::string edited = converted;
  edited.replace(edited.find("why"), 3, "who");
  CHECK_THROWS_WITH(samples(given(hash) + edited),
                    Catch::Contains("data.jsonl: got records with SHA-256 ") &&
                        Catch::Contains(", wanted the header's records_sha256 " + hash + ": they were edited"));
  CHECK(samples(header() + edited) == 1);
}

TEST_CASE("jsonl: an id of an earlier record is refused") {
  const TaskFixture f("jsonl");
  const auto env = f.env(1);
  const auto record = [](const std::string& id) {
    return R"({"id": )" + id + R"(, "context": "c", "input": "i", "answers": ["a"]})" + "\n";
  };
  f.write("data.jsonl", record("\"test-1\"") + record("2") + record("\"test-1\""));
  CHECK_THROWS_WITH(f.task(with({}))->samples(env),
                    Catch::Contains("data.jsonl: record 3: got the id 'test-1' of record 1, wanted an id of its own"));
  f.write("data.jsonl", record("\"test-1\"") + record("2") + record("null") + record("null"));
  CHECK(f.task(with({}))->samples(env) == 4);
}

TEST_CASE("jsonl: what is wrong is named with file and record") {
  const TaskFixture f("jsonl");
  const auto env = f.env(1);
  const auto fails = [&](const std::string& data, Given given, const std::string& message) {
    f.write("data.jsonl", data);
    CHECK_THROWS_WITH(f.task(with(std::move(given)))->sample(0, env), Catch::Contains(message));
  };
  const std::string good = R"({"context": "c", "input": "i", "answers": ["a"]})";
  fails(good.substr(0, good.size() - 1), {}, "data.jsonl:1: got text that is no JSON");
  fails(good + "\n" + good.substr(0, 20), {}, "data.jsonl:2: got text that is no JSON");
  fails("[" + good, {}, "data.jsonl: got text that is no JSON");
  fails("[" + good + ", 5]", {}, "data.jsonl: record 2: got JSON that is no object");
  fails("\n\n", {}, "got no records");
  fails("[]", {}, "got no records");
  fails("{\"context\": \"\xff\"}", {}, "data.jsonl:1: got text that is no JSON");
  fails("{\"context\": " + std::string(100000, '[') + std::string(100000, ']') + "}", {}, "nested deeper");
  fails(good + "\n" + R"({"input": "i", "answers": ["a"]})", {}, "data.jsonl: record 2: got no field 'context'");
  fails(good, {{"question_text", std::string("{inputt}")}},
        "record 1: got no field 'inputt', wanted one of: answers, context");
  fails(good, {{"references", std::string("gold")}}, "record 1: got no field 'gold'");
  fails(R"({"context": "c", "input": "i", "answers": []})", {}, "record 1: got no texts in 'answers'");
  fails(R"({"context": "c", "input": "i", "answers": ["a", " "]})", {}, "record 1: got an empty text in 'answers'");
  fails(R"({"context": "c", "input": "i", "answers": ""})", {}, "record 1: got an empty text in 'answers'");
  fails(R"({"context": "c", "input": "i", "answers": {}})", {}, "record 1: got no texts in 'answers'");
  fails(R"({"context": "c", "input": "i", "answers": null})", {}, "record 1: got no texts in 'answers'");
  fails(R"({"context": "c", "input": "i", "answers": {"text": ["a"]}})", {},
        "record 1: got an object or nested lists in 'answers', wanted texts: name a part, like 'answers.text'");
  fails(R"({"context": "c", "input": "i", "answers": [{"text": "a"}]})", {},
        "record 1: got an object or nested lists in 'answers'");
  for (const char* text : {"{", "a }", "{a{b}}", "{}", "{{{a}"})
    CHECK_THROWS_WITH(f.task(with({{"prompt", std::string(text)}}))->samples(env),
                      Catch::Contains("at byte") || Catch::Contains("no field"));
  CHECK_THROWS_WITH(f.task({}), Catch::Contains("got no data"));
  CHECK_THROWS_WITH(f.task({{"data", std::string("none.jsonl")}})->samples(env), Catch::Contains("none.jsonl"));
}
