#include "run/items.hpp"

#include <array>
#include <cmath>
#include <functional>
#include <limits>

#include "base/sha256.hpp"
#include "experiment/catalog.hpp"
#include "test/support/places.hpp"
#include "test/support/task_fixture.hpp"

using namespace kvlab;

namespace {

// A task with the samples of a test.
struct Script {
  std::vector<TaskSample> samples;
  std::string metric = "exact", complaint;
  std::optional<double> score = {};  // of the task's own metric
  std::string data = {};             // its file
} script;

struct Scripted final : Task {
  int samples(const TaskEnv&) const override { return static_cast<int>(script.samples.size()); }
  TaskSample sample(int i, const TaskEnv&) const override {
    if (!script.complaint.empty()) throw Error(Errc::config, script.complaint);
    return script.samples[static_cast<std::size_t>(i)];
  }
  std::string metric() const override { return script.metric; }
  std::optional<double> score(const std::string&, const std::vector<std::string>&) const override {
    return script.score;
  }
};

TaskItems made(Question question, int context = 100, const char* metric = nullptr) {
  static const Registration registration = task<Scripted>("scripted", "a test's own");
  Registry registry({test::plugin_folder()});
  registry.add(registration);
  TaskSpec spec;
  spec.name = "scripted";
  spec.where = "exp.yaml:3:5";
  spec.task = {Role::task, "scripted", Params({{"data", script.data}})};
  spec.question = question;
  const RegistryCatalog catalog(registry);
  spec.names_metric = metric != nullptr;
  if (metric) spec.metric = metric_named(metric, catalog);
  ModelConfig config;
  config.vocab = 50;
  config.context = context;
  return make_items(spec, catalog, test::test_vocabulary("gpt-2"), config, Experiment(), 1);
}

TaskQuestion asked(std::vector<int> tokens, int max_new = 3) {
  TaskQuestion q;
  q.tokens = std::move(tokens);
  q.references = {"yes"};
  q.max_new_tokens = max_new;
  return q;
}

TaskQuestion forced(std::vector<int> tokens) {
  TaskQuestion q;
  q.forced = std::move(tokens);
  return q;
}

void fails(const std::vector<TaskSample>& samples, const std::string& message, int context = 100) {
  script = {samples, "exact", ""};
  CHECK_THROWS_WITH(made(Question::prompt, context), Catch::Contains(message));
}

}  // namespace

TEST_CASE("the question is part of the prompt, or fed afterwards") {
  script = {{{{1, 2}, {asked({3}), asked({4, 5})}}, {{6}, {asked({})}}}, "exact", ""};
  const TaskItems seen = made(Question::prompt);
  REQUIRE(seen.items.size() == 3);
  CHECK(seen.samples == 2);
  CHECK(seen.metric == "exact");
  CHECK(seen.items[1].prompt == std::vector<int>{1, 2, 4, 5});
  CHECK(seen.items[1].fed.empty());
  CHECK(!seen.items[1].shared);
  CHECK((seen.items[1].sample == 0 && seen.items[1].question == 1));
  CHECK(seen.items[1].most_tokens() == 7);
  CHECK(seen.items[2].sample == 1);
  CHECK(seen.items[0].references == std::vector<std::string>{"yes"});

  const TaskItems later = made(Question::decode);
  CHECK(later.items[1].prompt == std::vector<int>{1, 2});
  CHECK(later.items[1].fed == std::vector<int>{4, 5});
  CHECK(later.items[0].shared);
  CHECK(!later.items[2].shared);
  CHECK(later.items[1].sha256 == seen.items[1].sha256);
  CHECK(later.items[0].sha256 == sha256_hex(std::string("\1\0\0\0\2\0\0\0\3\0\0\0", 12)));
}

TEST_CASE("a turn goes on where the one before it ended") {
  TaskQuestion second = asked({4, 5}), third = asked({6}, 2);
  second.follows = third.follows = true;
  script = {{{{1, 2}, {asked({3}), second, third, asked({7})}}}, "exact", ""};
  const TaskItems seen = made(Question::prompt);
  REQUIRE(seen.items.size() == 4);
  CHECK(seen.items[2].follows);
  CHECK(seen.items[2].prompt == std::vector<int>{1, 2, 3});
  CHECK(seen.items[2].fed == std::vector<int>{6});
  CHECK(seen.items[0].most_tokens() == 2 + 1 + 3);
  CHECK(seen.items[1].most_tokens() == 2 + 1 + 3 + 2 + 3);
  CHECK(seen.items[2].most_tokens() == 2 + 1 + 3 + 2 + 3 + 1 + 2);
  CHECK(!seen.items[3].follows);
  CHECK(seen.items[3].prompt == std::vector<int>{1, 2, 7});

  const TaskItems later = made(Question::decode);
  CHECK(later.items[1].prompt == std::vector<int>{1, 2});
  CHECK(later.items[2].most_tokens() == seen.items[2].most_tokens());
  CHECK((later.items[0].shared && later.items[3].shared));
  CHECK(later.items[1].sha256 == seen.items[1].sha256);
  CHECK(later.items[1].sha256 == sha256_hex(std::string("\1\0\0\0\2\0\0\0\3\0\0\0\4\0\0\0\5\0\0\0", 20)));

  CHECK_THROWS_WITH(made(Question::prompt, 13),
                    Catch::Contains("got 14 tokens of prompt and answer, wanted at most 13"));
  fails({{{1}, {second}}}, "got a first question that follows another one");
  second.tokens.clear();
  fails({{{1}, {asked({3}), second}}}, "got a later turn without a question");
}

TEST_CASE("forced tokens stand for the answer") {
  script = {{{{1, 2}, {forced({7, 8, 9})}}}, "contains", ""};
  const TaskItems items = made(Question::decode);
  CHECK(items.items[0].forced == std::vector<int>{7, 8, 9});
  CHECK(items.items[0].most_tokens() == 5);
}

TEST_CASE("samples that cannot run are refused before any work") {
  fails({}, "got a task without samples");
  fails({{{1}, {}}}, "sample 0: got a sample without questions");
  fails({{{}, {asked({})}}}, "got an empty prompt");
  fails({{{1}, {asked({1}, 0)}}}, "asks for no token");
  fails({{{1}, {asked({1})}}, {{50}, {asked({1})}}}, "exp.yaml:3:5: sample 1: got token 50, wanted 0 to 49");
  fails({{{1}, {asked({-1})}}}, "got token -1");
  fails({{{1}, {forced({2, 99})}}}, "got token 99");
  fails({{{1, 2}, {asked({3}, 8)}}}, "exp.yaml:3:5: sample 0: got 11 tokens of prompt and answer, wanted at most 10",
        10);
  TaskQuestion empty = asked({1});
  empty.references = {"yes", " "};
  fails({{{1}, {asked({1}), empty}}}, "sample 0: got an empty reference");
  script = {{{{1, 2}, {asked({3}, 7)}}}, "exact", ""};
  CHECK(made(Question::prompt, 10).items.size() == 1);
  script = {{{{1}, {asked({2})}}}, "exat", ""};
  CHECK_THROWS_WITH(made(Question::prompt),
                    Catch::Contains("got metric 'exat'") && Catch::Contains("did you mean 'exact'"));
  script = {{{{1}, {asked({2})}}}, "exact", "got a bad thing"};
  CHECK_THROWS_WITH(made(Question::prompt),
                    Catch::Equals("exp.yaml:3:5: sample 0: scripted, sample(): got a bad thing"));
}

TEST_CASE("a prompt longer than the model is named with its file and record") {
  TaskQuestion q = asked({3}, 8);
  q.record = std::make_shared<const Record>(Record{{"id", {"r-7"}}});
  script = {{{{1, 2}, {q}}}, "exact", "", {}, "facts.jsonl"};
  CHECK_THROWS_WITH(made(Question::prompt, 10),
                    Catch::Contains("exp.yaml:3:5: facts.jsonl: sample 0, id r-7: got 11 tokens"));
}

TEST_CASE("numbers that no machine could serve are refused before the prompts are made") {
  const auto refused = [](const char* parameter, std::int64_t value) {
    Registry registry({test::plugin_folder()});
    const RegistryCatalog catalog(registry);
    TaskSpec spec;
    spec.where = "exp.yaml:3:5";
    spec.name = "niah";
    std::map<std::string, ParamValue> given{{"context", std::int64_t{1024}}};
    given[parameter] = value;
    spec.task = {Role::task, "niah", resolve(*catalog.find(Role::task, "niah"), given)};
    ModelConfig config;
    config.vocab = 50257;
    config.context = 2048;
    CHECK_THROWS_WITH(make_items(spec, catalog, test::test_vocabulary("gpt-2"), config, Experiment(), 1),
                      Catch::Contains("exp.yaml:3:5: got ") && Catch::Contains(", wanted at most "));
  };
  refused("context", 2049);
  refused("context", INT32_MAX);
  // 100000 samples at five depths, 1024 tokens each, are 512 million tokens.
  refused("samples", 100000);
}

TEST_CASE("a task may learn its metric from its data, in samples()") {
  struct Late final : Task {
    int samples(const TaskEnv&) const override {
      name = "rouge_l";
      return 1;
    }
    TaskSample sample(int, const TaskEnv&) const override { return {{1}, {asked({2})}}; }
    std::string metric() const override { return name; }
    mutable std::string name = "f1";
  };
  static const Registration registration = task<Late>("late", "a test's own");
  Registry registry({test::plugin_folder()});
  registry.add(registration);
  TaskSpec spec;
  spec.name = "late";
  spec.task = {Role::task, "late", Params()};
  ModelConfig config;
  config.vocab = 50;
  config.context = 100;
  const RegistryCatalog catalog(registry);
  const auto items = [&] { return make_items(spec, catalog, test::test_vocabulary("gpt-2"), config, Experiment(), 1); };
  const TaskItems named_late = items();
  CHECK(named_late.metric == "rouge_l");
  REQUIRE(named_late.use);
  CHECK(named_late.use->name == "rouge_l");
  // The entry's metric goes first.
  spec.names_metric = true;
  spec.metric = metric_named("exact", catalog);
  CHECK(items().metric == "exact");
  CHECK(items().use->name == "exact");
}

TEST_CASE("a task's own metric scores its answers") {
  script = {{{{1}, {asked({2})}}}, "mine", "", 0.25};
  const TaskItems own = made(Question::prompt);
  CHECK(own.metric == "mine");
  CHECK(own.score(own.items[0], "whatever") == 0.25);
  CHECK(std::isnan(own.score(Item(), "whatever")));
  for (const double wrong : {1.5, -0.5, std::numeric_limits<double>::quiet_NaN()}) {
    script.score = wrong;
    CHECK_THROWS_WITH(own.score(own.items[0], "whatever"),
                      Catch::Contains("scripted, score()") && Catch::Contains("wanted 0 to 1"));
  }
  script.score.reset();
  CHECK_THROWS_WITH(own.score(own.items[0], "whatever"), Catch::Contains("got no score by the task's own metric"));
  script = {{{{1}, {asked({2})}}}, "exact", ""};
  const TaskItems shared = made(Question::prompt);
  CHECK(shared.score(shared.items[0], "Yes") == 1);
}

TEST_CASE("the entry's metric goes before the task's own, and reads the question's record") {
  script = {{{{1}, {asked({2})}}}, "mine", "", 0.25};
  const TaskItems items = made(Question::prompt, 100, "exact");
  CHECK(items.metric == "exact");
  CHECK(items.score(items.items[0], "Yes") == 1);

  CHECK_THROWS_WITH(made(Question::prompt, 100, "classification"),
                    Catch::Contains("exp.yaml:3:5: sample 0: plugin classification") &&
                        Catch::Contains("got no texts in the field 'all_classes'"));
  TaskQuestion question = asked({2});
  question.record = std::make_shared<Record>(Record{{"all_classes", {"yes", "no"}}});
  script = {{{{1}, {question}}}, "mine", "", 0.25};
  const TaskItems classes = made(Question::prompt, 100, "classification");
  CHECK(classes.score(classes.items[0], "yes or no") == 0.5);
}

TEST_CASE("a task's metric is known from its entry, for ids and results") {
  Registry registry({test::plugin_folder()});
  const RegistryCatalog catalog(registry);
  const auto metric = [&](const std::string& entry) -> std::string {
    const yaml::Document document = yaml::parse_text(entry, "exp.yaml");
    Problems problems(document);
    const auto task = read_task(document.root, catalog, problems);
    problems.raise();
    return task->metric ? task->metric->name : "";
  };
  CHECK(metric("niah") == "contains");
  CHECK(metric("passkey") == "first_integer");
  CHECK(metric("passkey: {metric: word}") == "word");
  CHECK(metric("jsonl: {data: x.jsonl}") == "f1");
  CHECK(metric("ordered_list") == "");
  CHECK(metric("text") == "");
}

TEST_CASE("draws repeat whole conversations, and leave forced texts alone") {
  TaskItems all;
  for (int i = 0; i < 4; ++i) {
    Item item;
    item.sample = i / 2, item.question = i % 2;
    item.prompt = {1, 2, 3};
    item.follows = i == 1;
    if (i == 3) item.forced = {4};
    all.items.push_back(item);
  }
  const TaskItems three = drawn(all, 3, "here");
  std::vector<std::array<int, 3>> got;
  for (const Item& item : three.items) got.push_back({item.sample, item.question, item.draw});
  CHECK(got == std::vector<std::array<int, 3>>{{0, 0, 0},
                                               {0, 1, 0},
                                               {0, 0, 1},
                                               {0, 1, 1},
                                               {0, 0, 2},
                                               {0, 1, 2},
                                               {1, 0, 0},
                                               {1, 0, 1},
                                               {1, 0, 2},
                                               {1, 1, -1}});
  CHECK(three.items[3].follows);
  CHECK_FALSE(three.items[4].follows);
  all.items[0].prompt.resize(std::size_t{1} << 20);
  CHECK_THROWS_WITH(drawn(all, 1000, "here"), Catch::Contains("here: got 1000 draws for 4 questions"));
}
