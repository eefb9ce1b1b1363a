// A metric plugin out of the build's own folder, and the scores that public scorers give (tools/goldens/metrics.py).
#pragma once
#include <catch2/catch.hpp>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "plugin/parameters.hpp"
#include "plugin/registry.hpp"
#include "test/support/library_under_test.hpp"
#include "test/support/places.hpp"

namespace kvlab::test {

inline Instance<AnswerMetric> metric(const std::string& name, const std::map<std::string, ParamValue>& given = {}) {
  static Registry registry(library_under_test());
  const PluginInfo& info = registry.require(Role::metric, name);
  return create<AnswerMetric>(info, resolve(info, given));
}

inline double score(const std::string& name, const std::string& answer, const std::vector<std::string>& references,
                    const Record& record = {}) {
  return metric(name)->score(answer, references, record);
}

inline std::string repeated(const std::string& text, std::size_t times) {
  std::string out;
  for (std::size_t i = 0; i < times; ++i) out += text;
  return out;
}

// Checks the metric on its cases in core/test/golden/metrics.json. Scores must be equal in every bit.
inline void check_golden(const std::string& name) {
  std::ifstream file(source_root() / "core/test/golden/metrics.json");
  const nlohmann::json cases = nlohmann::json::parse(file).at(name);
  REQUIRE(cases.size() > 5);
  for (const auto& c : cases) {
    std::map<std::string, ParamValue> given;
    const nlohmann::json params = c.value("params", nlohmann::json::object());
    for (const auto& [key, value] : params.items())
      given[key] = value.is_boolean() ? ParamValue(value.get<bool>()) : ParamValue(value.get<std::string>());
    const auto times = c.value("times", std::vector<std::size_t>{1, 1});
    auto references = c.at("references").get<std::vector<std::string>>();
    for (std::string& reference : references) reference = repeated(reference, times[1]);
    const auto one = metric(name, given);
    const Record record = c.value("record", Record());
    INFO(name << " of " << c.dump());
    CHECK_NOTHROW(one->check(references, record));
    CHECK(one->score(repeated(c.at("answer"), times[0]), references, record) == c.at("score").get<double>());
  }
}

}  // namespace kvlab::test
