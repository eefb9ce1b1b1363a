#include "run/task_env.hpp"

#include "test/support/task_fixture.hpp"

using namespace kvlab;
using test::TaskFixture;

namespace {

std::vector<int> joined(std::vector<int> a, const std::vector<int>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace

TEST_CASE("tokens of pieces may be put one after the other") {
  for (const char* vocabulary : {"gpt-2", "llama-spm"}) {
    const TaskFixture f("niah", vocabulary);
    const auto env = f.env(1);
    const std::string pieces[] = {"Call me Ishmael.", " Some years ago", "\nnever mind",
                                  "\n\nhow long",     " né 漢字 7 12",   "\t tab"};
    std::string whole = pieces[0];
    std::vector<int> tokens = env.encode(whole);
    for (std::size_t i = 1; i < std::size(pieces); ++i) {
      whole += pieces[i];
      tokens = joined(std::move(tokens), env.encode_next(pieces[i]));
      CHECK(env.decode(tokens) == whole);
    }
    CHECK(env.encode_next("").empty());
  }
  // A cut in front of a word's space changes no token.
  for (const char* vocabulary : {"gpt-2", "llama-spm"}) {
    const TaskFixture f("niah", vocabulary);
    const auto env = f.env(1);
    CHECK(joined(env.encode("Call me"), env.encode_next(" Ishmael. Some")) == env.encode("Call me Ishmael. Some"));
    CHECK(joined(env.encode("Call\n"), env.encode_next("me")) == env.encode("Call\nme"));
  }
}

TEST_CASE("control tokens in a text are plain text") {
  const TaskFixture f("niah");
  const auto env = f.env(1);
  const auto tokens = env.encode("<|endoftext|>");
  CHECK(tokens.size() > 1);
  CHECK(env.decode(tokens) == "<|endoftext|>");
}

TEST_CASE("a model without a template opens with BOS, if it wants one, and closes with nothing") {
  const auto spm = TaskFixture("niah", "llama-spm").env(1);
  CHECK(spm.chat_open() == std::vector<int>{1});
  CHECK(spm.text_open() == std::vector<int>{1});
  CHECK(spm.chat_close().empty());
  const auto gpt2 = TaskFixture("niah").env(1);
  CHECK(gpt2.text_open().empty());
}

TEST_CASE("files lie beside the experiment or in the data folder") {
  const TaskFixture f("niah");
  f.write("a.txt", "\xef\xbb\xbfhello\r\n");
  const auto env = f.env(1);
  CHECK(env.read_text("a.txt") == "hello\r\n");
  CHECK(env.read_text("bundled/niah/haystack.txt").size() > 150000);
  for (const char* path : {"none.txt", "a.txt/b", "bundled/none"}) {
    INFO(path);
    CHECK_THROWS_WITH(env.read_text(path), Catch::Contains("when opening the file, wanted a text file"));
  }
  CHECK_THROWS_WITH(env.read_text(""), Catch::Contains("got no path"));
  CHECK_THROWS_WITH(env.records("data/qa/none.jsonl"),
                    Catch::Contains("data/qa/none.jsonl: got no such file, wanted JSON lines") &&
                        Catch::Contains("convert.py list") && Catch::Contains("data/qa`"));
  const ModelTaskEnv here(test::test_vocabulary("gpt-2"), "", 1, 1);
  CHECK_THROWS_WITH(here.records("no-such-set.jsonl"),
                    Catch::Contains("no-such-set.jsonl: got no such file") && Catch::Contains("--to .` makes"));
}

TEST_CASE("what is no text is refused with file and byte") {
  const TaskFixture f("niah");
  const auto env = f.env(1);
  const auto refused = [&](const char* path, const std::string& message) {
    INFO(path);
    CHECK_THROWS_WITH(env.read_text(path), Catch::Contains(path) && Catch::Contains(message));
  };
  f.write("zero.txt", std::string_view("some text\0more", 14));
  refused("zero.txt", "got byte 0x00 at offset 9, wanted a text file in UTF-8");
  f.write("latin1.txt", "caf\xe9 au lait");
  refused("latin1.txt", "got byte 0xe9 at offset 3");
  f.write("cut.txt", "\xef\xbb\xbfx\xe2\x82");
  refused("cut.txt", "got byte 0xe2 at offset 1");
  f.write("empty.txt", "");
  refused("empty.txt", "got a file without text");
  f.write("blank.txt", " \n\r\n\t");
  refused("blank.txt", "got a file without text");
  CHECK_THROWS_WITH(env.read_text("."), Catch::Contains("got a folder, wanted a text file"));
  CHECK_THROWS_WITH(env.read_text("/dev/zero"), Catch::Contains("got a device, wanted a text file"));
  CHECK_THROWS_WITH(env.records("/dev/zero"), Catch::Contains("got a device, wanted a text file"));
  f.write("page.txt", "a\fb \xe6\xbc\xa2\n");  // a file with a form feed is a text file
  CHECK(env.read_text("page.txt").size() == 8);
}

TEST_CASE("records keep every field as text, and the parts of what is no text") {
  const TaskFixture f("niah");
  f.write("r.json",
          "\xef\xbb\xbf [{\"a\": \"x\", \"b\": [1, \"y\", {\"c\": 2}], \"d\": null, \"e\": 1.5, \"f\": true}]");
  const auto records = f.env(1).records("r.json");
  REQUIRE(records.size() == 1);
  const Record& r = records[0];
  CHECK(r.at("a") == std::vector<std::string>{"x"});
  CHECK(r.at("b") == std::vector<std::string>{"1", "y", "{\"c\":2}"});
  CHECK(r.at("b.0") == std::vector<std::string>{"1"});
  CHECK(r.at("b.1") == std::vector<std::string>{"y"});
  CHECK(r.at("b.2.c") == std::vector<std::string>{"2"});
  CHECK(r.at("d").empty());
  CHECK(r.at("e") == std::vector<std::string>{"1.5"});
  CHECK(r.at("f") == std::vector<std::string>{"true"});
  CHECK(r.size() == 9);  // with b.2
  // SQuAD's layout of answers.
  f.write("squad.json", R"({"answers": {"text": ["x", "y"], "answer_start": [3, 5]}})");
  const Record squad = f.env(1).records("squad.json").at(0);
  CHECK(squad.at("answers.text") == std::vector<std::string>{"x", "y"});
}

TEST_CASE("stop texts are a list of texts, of a record or of a header, else file and record are named") {
  const TaskFixture f("niah");
  const auto refused = [&](const std::string& line, const std::string& why) {
    CAPTURE(line);
    f.write("s.jsonl", "{\"a\": 1, \"stop\": []}\n" + line + "\n");
    CHECK_THROWS_WITH(f.env(1).records("s.jsonl"), Catch::Contains("s.jsonl:2: got " + why));
  };
  refused(R"({"stop": "\n", "a": 1})", "a value of the type string as 'stop', wanted a list of texts");
  refused(R"({"stop": null})", "a value of the type null");
  refused(R"({"stop": {"a": 1}})", "a value of the type object");
  refused(R"({"stop": ["x", 3]})", "a list with a value of the type number");
  refused(R"({"stop": ["x", ""]})", "a list with an empty text");
  refused(R"({"kvlab_dataset": {"stop": "x"}})", "a value of the type string as 'kvlab_dataset.stop'");
  f.write("s.json", R"([{"stop": ["x", "\ny"]}, {"stop": 1}])");
  CHECK_THROWS_WITH(f.env(1).records("s.json"), Catch::Contains("s.json: record 2: got a value of the type number"));
  f.write("s.json", R"([{"stop": ["x", "\ny"]}, {"more": {"stop": 1}, "a": 2}])");
  CHECK(f.env(1).records("s.json")[0].at("stop") == std::vector<std::string>{"x", "\ny"});
  // An object of another name is data, even where it is all of a record.
  f.write("s.json", R"([{"journey": {"from": "home", "stop": "market"}}])");
  CHECK(f.env(1).records("s.json")[0].at("journey.stop") == std::vector<std::string>{"market"});
}

TEST_CASE("every cut of a record is an error, never a record") {
  const TaskFixture f("niah");
  const std::string whole = R"({"a": "\u00e9 \"q\"", "b": [1, {"c": null}], "d": -1.5e3})";
  for (std::size_t n = 1; n < whole.size(); ++n) {
    f.write("cut.jsonl", whole.substr(0, n));
    CHECK_THROWS_WITH(f.env(1).records("cut.jsonl"), Catch::Contains("cut.jsonl:1: got text that is no JSON"));
  }
  f.write("cut.jsonl", whole);
  CHECK(f.env(1).records("cut.jsonl").size() == 1);
}
