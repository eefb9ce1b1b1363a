#include "run/verify.hpp"

#include <catch2/catch.hpp>
#include <kvlab/error.hpp>

#include "experiment/override_lines.hpp"
#include "run/model_record.hpp"
#include "support/contract.hpp"

using namespace kvlab;

TEST_CASE("the overrides at the end of a recorded experiment are taken off it in their order") {
  const yaml::Document d =
      recorded_experiment("a: 1\n# --set of a comment\n# b\n# --set a=2\n# --set b=[1, 2]\n", "x.yaml");
  CHECK(d.text == "a: 1\n# --set of a comment\n# b\n");
  CHECK(d.sets == std::vector<std::string>{"a=2", "b=[1, 2]"});
  CHECK(d.file == "x.yaml");
  CHECK(recorded_experiment("a: 1", "x.yaml").sets.empty());
  CHECK(recorded_experiment("# --set a=2\n", "x.yaml").text.empty());
}

TEST_CASE("an author's last lines that look like overrides stay in the text") {
  const std::vector<std::string> none, two{"a=2", "b=\"x\""};
  for (const std::string text : {"a: 1\n# --set a=3\n", "# --set a=3\n", "a: 1\n# overrides:\n", "a: 1\n", "",
                                 "a: 1\n# --set a=3\n# overrides:\n# --set a=4\n"})
    for (const auto& sets : {none, two}) {
      CAPTURE(text, sets);
      const yaml::Document d = recorded_experiment(add_overrides(text, sets), "x.yaml");
      CHECK(d.text == text);
      CHECK(d.sets == sets);
    }
  CHECK(recorded_experiment(add_overrides("a: 1\n# --set a=3", two), "x.yaml").text == "a: 1\n# --set a=3\n");
  CHECK(add_overrides("a: 1", none) == "a: 1");
}

TEST_CASE("models are recorded with tokenizer, chat template and stop ids") {
  const auto model = test::tiny_model("llama-gqa3");
  const auto read = read_models(models_text({model, model}));
  REQUIRE(read.size() == 1);
  CHECK(read[0].name == model->name);
  CHECK(read[0].content == model->fingerprint);
  CHECK(read[0].tokenizer == model->tokenizer->id());
  CHECK(read[0].stop_ids == "[1]");  // config.json
  CHECK(record_of("m", "c", nullptr).stop_ids == "none");
  CHECK(read_models("").empty());
  CHECK_THROWS_AS(read_models("{"), Error);
  CHECK_THROWS_AS(read_models(R"([{"name": 1}])"), Error);
}
