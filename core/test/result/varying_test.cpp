#include "result/varying.hpp"

#include <catch2/catch.hpp>

using kvlab::flat_parameters;
using kvlab::varying_text;

TEST_CASE("variants are named by what differs, in the words of the experiment file") {
  const std::string a =
      R"({"scorer": {"snapkv": {"window": 8, "kernel": 7}}, "budget": {"tokens": 64}, "page_size": 16})";
  const std::string b =
      R"({"scorer": {"snapkv": {"window": 9, "kernel": 7}}, "budget": {"tokens": 32}, "page_size": 16})";
  CHECK(varying_text(a, {a}) == "");
  CHECK(varying_text(a, {a, b}) == "window=8");
  CHECK(varying_text(b, {a, b}) == "window=9");
}

TEST_CASE("a split, a codec and another page size are told, the budget's amount is not") {
  const std::string plain = R"({"scorer": {"k": {}}, "budget": {"tokens": 64}, "page_size": 16})";
  const std::string uniform =
      R"({"scorer": {"k": {}}, "budget": {"tokens": 64, "split": {"uniform": {}}}, "page_size": 16})";
  const std::string ada =
      R"({"scorer": {"k": {}}, "budget": {"tokens": 64, "split": {"adakv": {"floor": 0.2}}}, "codec": {"int8": {"keys": true}}, "page_size": 32})";
  CHECK(varying_text(plain, {plain, uniform, ada}) == "page_size=16");
  CHECK(varying_text(uniform, {plain, uniform, ada}) == "page_size=16 split.uniform");
  // A plugin's parameter may have the name of an amount.
  CHECK(varying_text(R"({"scorer": {"k": {"tokens": 3}}})", {R"({"scorer": {"k": {"tokens": 4}}})"}) == "tokens=3");
  CHECK(varying_text(ada, {plain, ada}) == "codec.int8.keys=true page_size=32 split.adakv.floor=0.2");
}

TEST_CASE("parameters are flat, in the words of the experiment file") {
  using Flat = std::map<std::string, std::string>;
  CHECK(flat_parameters(R"({"scorer": {"snapkv": {"window": 8, "pool": "max"}}, "schedule": {"prefill": true},
                            "budget": {"ratio": 0.25, "split": {"adakv": {"floor": 0.2}}}, "codec": {"int8": {}}})") ==
        Flat{{"window", "8"},
             {"pool", "max"},
             {"schedule.prefill", "true"},
             {"budget.ratio", "0.25"},
             {"budget.split.adakv.floor", "0.2"},
             {"codec.int8", "true"}});
  for (const char* text : {"", "{", "3", "[1]", "{}"}) CHECK(flat_parameters(text).empty());
}

TEST_CASE("what is no JSON object has no variants") {
  for (const char* text : {"", "{", "3", "[1]", "{}"}) CHECK(varying_text(text, {R"({"a": 1})"}) == "");
}
