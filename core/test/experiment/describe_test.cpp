#include "experiment/describe.hpp"

#include <catch2/catch.hpp>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/threads.hpp"
#include "experiment/entry_keys.hpp"
#include "experiment/experiment_keys.hpp"
#include "experiment/schema.hpp"
#include "test/support/places.hpp"

using namespace kvlab;
namespace fs = std::filesystem;

namespace {

const fs::path good = test::build_root() / "lib" / "bad_plugins" / "libgood.so";

}  // namespace

TEST_CASE("list shows each plugin of the kind, its library, and what could not be loaded") {
  Registry registry({good, good.parent_path() / "libold_abi.so"});
  const std::string budgets = list_text(registry, "budgets");
  CHECK_THAT(budgets, Catch::Contains("good") && Catch::Contains(good.filename().string()) &&
                          Catch::Contains("every kind of parameter") && Catch::Contains(KVLAB_VERSION));
  CHECK_THAT(budgets, !Catch::Contains("\nplain"));
  CHECK_THAT(budgets, Catch::Contains("not usable") && Catch::Contains("libold_abi.so: got plugin ABI"));
  CHECK_THAT(list_text(registry, "policies"), Catch::Contains("\nfull"));
  CHECK_THAT(list_text(registry, ""),
             Catch::Contains("\nfull") && Catch::Contains("\nplain") && Catch::Contains("2.5"));
  CHECK_THROWS_WITH(list_text(registry, "codec"), Catch::Contains("did you mean 'codecs'?"));
}

TEST_CASE("describe shows the whole declaration and an example that names every parameter") {
  Registry registry({good});
  const std::string text = describe_text(registry, "good");
  for (const char* part : {"good (budget, version", "flag", "boolean", "count", "at least 1", "0 to 1", "an integer",
                           "mean | max | sum | softmax_mean", "components", "a part of the method",
                           "split: {good: {flag: false, count: 4, share: 0.5, group: max, note: "})
    CHECK_THAT(text, Catch::Contains(part));
  CHECK_THAT(describe_text(registry, "plain"), Catch::Contains("no parameters") && Catch::Contains("codec: plain"));
  CHECK_THAT(describe_text(registry, "full"), Catch::Contains("placement") && Catch::Contains("page_size"));
  CHECK_THROWS_WITH(describe_text(registry, "plian"), Catch::Contains("did you mean 'plain'?"));
  CHECK_THROWS_WITH(describe_text(registry, "nonsense"), Catch::Contains("full, "));
}

TEST_CASE("inspect reads a library of any build, without running it") {
  const auto library = [](const char* name) { return good.parent_path() / (std::string("lib") + name + ".so"); };
  const std::string text = inspect_text(good);
  for (const char* part : {"good (budget, version", "plain (codec, version 2.5)", "at least 1", "a part of the method",
                           KVLAB_BUILD, "its build is this kvlab's", "sha256"})
    CHECK_THAT(text, Catch::Contains(part));
  const auto json = nlohmann::json::parse(inspect_json(good));
  CHECK(json["same_build"] == true);
  CHECK(json["roles"][0]["params"][2]["default"] == 4);
  CHECK(json["roles"][1]["name"] == "plain");
  CHECK_THAT(inspect_text(library("old_abi")), Catch::Contains("no: got plugin ABI"));
  CHECK(nlohmann::json::parse(inspect_json(library("wrong_build")))["same_build"] == false);
  CHECK_THAT(inspect_text(library("throwing_registration")), Catch::Contains("not known"));
  CHECK(nlohmann::json::parse(inspect_json(library("throwing_registration")))["roles"].is_null());
  CHECK_THROWS_WITH(inspect_text(library("no_note")), Catch::Contains("without kvlab's note"));
  CHECK_THROWS_WITH(inspect_text(library("not_elf")), Catch::Contains("not an ELF library"));
}

TEST_CASE("the JSON list has every parameter, a line for each") {
  Registry registry({good});
  const std::string text = list_json(registry, "budgets");
  CHECK_THAT(text, Catch::Contains("\n      {\"name\":\"count\",\"type\":\"integer\",\"default\":4,\"low\":1"));
  const auto json = nlohmann::json::parse(text);
  const auto found = std::find_if(json.begin(), json.end(), [](const auto& p) { return p["name"] == "good"; });
  REQUIRE(found != json.end());
  CHECK((*found)["params"].size() == 6);
  CHECK((*found)["params"][1]["component"] == true);
}

TEST_CASE("describe shows what a method needs") {
  Registry registry;
  CHECK_THAT(describe_text(registry, "tova"), Catch::Contains("needs\n  devices         all\n") &&
                                                  Catch::Contains("all KV heads of a layer hold the same tokens") &&
                                                  Catch::Contains("the prompt's last 1") &&
                                                  Catch::Contains("attention mass  of steps"));
  CHECK_THAT(describe_text(registry, "int8"), !Catch::Contains("needs\n"));
  CHECK_THAT(describe_text(registry, "k8v4"),
             Catch::Contains("stores\n  keys     codes of 8 bits\n  values   codes of 4 bits\n") &&
                 Catch::Contains("208 bytes of a KV head of 128, in pages of 16; 520 without a codec"));
  CHECK_THAT(describe_text(registry, "fp8"), Catch::Contains("keys     FP8 (e4m3)"));
  CHECK_THAT(describe_text(registry, "k16v8"), Catch::Contains("keys     in the run's dtype"));
  CHECK_THAT(describe_text(registry, "arkvale"), Catch::Contains("pages that the method places there") &&
                                                     Catch::Contains("of each page's keys") &&
                                                     Catch::Contains("dense layers"));
  CHECK_THAT(describe_text(registry, "flexicache"),
             Catch::Contains("beside the rest of the step") && Catch::Contains("counted on the device"));
  CHECK_THAT(describe_text(registry, "h2o"),
             Catch::Contains("token state     score") && Catch::Contains("a GPU may replay decode steps as a graph"));
  CHECK_THAT(describe_text(registry, "criticalkv"),
             Catch::Contains("the output projection") && Catch::Contains("criticalkv (rescorer, ") &&
                 Catch::Contains("{rescorer: {criticalkv: {first_stage: 0.5, epsilon: 0.0001}}, budget"));
  CHECK_THAT(describe_text(registry, "twilight"),
             Catch::Contains("twilight (policy, ") && Catch::Contains("twilight (pruner, ") &&
                 Catch::Contains("{pruner: {twilight: {p: 0.85, dense_layers: 2}}, budget: {tokens: 512}}"));
  CHECK_THAT(describe_text(registry, "fastgen"), Catch::Contains("which are special or punctuation"));
  CHECK_THAT(describe_text(registry, "squeezed_attention"), Catch::Contains("once all layers have ended"));
  CHECK_THAT(describe_text(registry, "adakv"), !Catch::Contains("needs\n") && !Catch::Contains("profile: FILE"));
  CHECK_THAT(describe_text(registry, "head_profile"),
             Catch::Contains("needs\n  profile  a file of `kvlab profile`") && Catch::Contains(", profile: FILE}"));
}

TEST_CASE("describe lists the keys that an entry of the plugin takes, and no others") {
  Registry registry;
  const auto keys = [&](const char* name) {
    std::string text = describe_text(registry, name), found;
    text = text.substr(text.find("keys of its entry\n"));
    text.resize(text.find("\nexample"));
    for (const EntryKey& key : policy_keys())
      if (text.find(std::string("\n  ") + key.name + " ") != text.npos) found += std::string(key.name) + " ";
    return found + (text.find("split") == text.npos ? "" : "with split");
  };
  CHECK(keys("knorm") == "scorer rescorer budget schedule codec placement page_size profile with split");
  CHECK(keys("quest") == "selector pruner budget codec placement page_size ");
  CHECK(keys("arkvale") == "policy pruner budget codec placement page_size ");
  CHECK(keys("flexicache") == "policy pruner budget codec placement page_size profile ");
  CHECK(keys("leankv") == "policy page_size ");
  CHECK(keys("think") == "policy page_size ");
  CHECK(keys("heterocache") == "policy budget codec page_size profile ");
  CHECK(keys("twilight") == "policy pruner codec page_size ");
  CHECK(keys("full") == "policy pruner codec placement page_size ");
}

TEST_CASE("the schema is generated from the declarations") {
  Registry registry({good});
  const auto schema = nlohmann::json::parse(schema_text(registry));
  CHECK(schema["$schema"] == "https://json-schema.org/draft/2020-12/schema");
  CHECK(schema["required"] == nlohmann::json({"model", "tasks"}));
  CHECK(schema["anyOf"].size() == 2);  // policies or profilers
  CHECK_FALSE(schema["additionalProperties"].get<bool>());
  CHECK(schema["properties"]["threads"]["maximum"] == most_threads());
  // Every reference leads somewhere.
  const std::string text = schema.dump();
  for (auto at = text.find("#/$defs/"); at != std::string::npos; at = text.find("#/$defs/", at + 1)) {
    const std::string name = text.substr(at + 8, text.find('"', at) - at - 8);
    CAPTURE(name);
    CHECK(schema["$defs"].contains(name));
  }
  const auto& named = schema["$defs"]["budget"]["anyOf"][1]["properties"]["good"];
  CHECK(named["description"] == "every kind of parameter");
  CHECK_FALSE(named["additionalProperties"].get<bool>());
  const auto& share = named["properties"]["share"];
  CHECK(share["default"] == 0.5);
  CHECK(share["anyOf"][0] == nlohmann::json({{"type", "number"}, {"minimum", 0}, {"maximum", 1}}));
  CHECK(share["anyOf"][1]["items"] == share["anyOf"][0]);  // an axis
  CHECK(named["properties"]["count"]["anyOf"][0] == nlohmann::json({{"type", "integer"}, {"minimum", 1}}));
  CHECK(named["properties"]["group"]["anyOf"][0]["enum"].size() == 4);
  CHECK(named["properties"]["part"]["default"] == true);
}

TEST_CASE("the schema takes a bare true or false where these are words of a choice") {
  Registry registry({test::plugin_folder() / "libjsonl.so"});
  const auto schema = nlohmann::json::parse(schema_text(registry));
  const auto& named = schema["$defs"]["task_entry"]["anyOf"][1]["properties"]["jsonl"]["properties"];
  CHECK(named["chat"]["anyOf"][0]["enum"] == nlohmann::json({"auto", "true", "false", true, false}));
  CHECK(named["truncate"]["anyOf"][0]["enum"] == nlohmann::json({"auto", "none", "middle"}));
}

TEST_CASE("describe spells texts as YAML does, and cuts long ones in the table only") {
  Registry registry({good});
  const std::string text = describe_text(registry, "good");
  const std::string whole = R"(note: "a \"text\" of two lines,\nlonger than a column")";
  CHECK_THAT(text, Catch::Contains(whole) && Catch::Contains(R"("a \"text\" of two lines,\nl...")"));
}

TEST_CASE("the pages under experiments name every key of an experiment file") {
  const auto page = [](const char* file) {
    std::ifstream in(test::source_root() / "experiments" / file);
    return std::string((std::istreambuf_iterator<char>(in)), {});
  };
  const auto names = [](const std::string& text, const std::string& key) {
    CAPTURE(key);
    const auto has = [&](const char* end) { return text.find("`" + key + end) != text.npos; };
    CHECK((has("`") || has(":") || has(".") || has(" ")));
  };
  const std::string main = page("README.md"), serving = page("serving/README.md");
  for (const std::string& key : experiment_key_names()) names(main, key);
  for (const EntryKey& key : policy_keys()) names(main, key.name);
  for (const EntryKey& key : task_keys()) names(main, key.name);
  for (const ParamSpec& key : workload_keys()) names(serving, "workload." + key.name);
}
