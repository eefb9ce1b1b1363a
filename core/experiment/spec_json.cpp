#include <nlohmann/json.hpp>

#include "experiment/policy_spec.hpp"

namespace kvlab {
namespace {

using Json = nlohmann::ordered_json;

Json to_json(const ParamValue& value) {
  return std::visit([](const auto& v) { return Json(v); }, value);
}

}  // namespace

Json to_json(const Params& params) {
  Json json = Json::object();
  for (const auto& [name, value] : params.values()) json[name] = to_json(value);
  return json;
}

Json to_json(const PolicySpec& policy) {
  const auto use = [](const PluginUse& u) { return Json{{u.name, to_json(u.params)}}; };
  static constexpr const char* amounts[] = {"unlimited", "tokens", "ratio", "bytes"};
  Json json = Json::object();
  if (policy.policy) json["policy"] = use(*policy.policy);
  if (policy.scorer) json["scorer"] = use(*policy.scorer);
  if (policy.selector) json["selector"] = use(*policy.selector);
  if (policy.pruner) json["pruner"] = use(*policy.pruner);
  if (policy.rescorer) json["rescorer"] = use(*policy.rescorer);
  if (policy.budget.kind != BudgetAmount::unlimited) {
    Json budget = Json::object();
    if (policy.budget.kind == BudgetAmount::ratio)
      budget["ratio"] = policy.budget.value;
    else
      budget[amounts[policy.budget.kind]] = static_cast<std::int64_t>(policy.budget.value);
    if (policy.split) budget["split"] = use(*policy.split);
    json["budget"] = budget;
  }
  if (policy.scorer) {
    json["schedule"] = {{"prefill", policy.schedule.prefill}};
    if (policy.schedule.every) json["schedule"]["every"] = *policy.schedule.every;
  }
  if (policy.codec) json["codec"] = use(*policy.codec);
  if (policy.placement.tier != Tier::device) {
    json["placement"] = {{"tier", "host"}, {"resident", policy.placement.resident}};
    if (policy.placement.codec) json["placement"]["codec"] = use(*policy.placement.codec);
  }
  json["page_size"] = policy.page_size;
  if (!policy.profile.empty()) json["profile"] = policy.profile;
  return json;
}

Json to_json(const TaskSpec& task) {
  Json json = {{task.task.name, to_json(task.task.params)}};
  json["question"] = task.question == Question::decode ? "decode" : "prompt";
  json["questions"] = task.questions;
  if (task.turns > 1) json["turns"] = task.turns;
  // Data may change what the task names, but not what its entry names.
  if (task.metric)
    json[task.names_metric ? "metric" : "task_metric"] = {{task.metric->name, to_json(task.metric->params)}};
  return json;
}

}  // namespace kvlab
