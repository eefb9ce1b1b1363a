#include "experiment/variants.hpp"

#include <nlohmann/json.hpp>

#include "experiment/experiment.hpp"
#include "result/varying.hpp"

namespace kvlab {

std::string policy_text(const Experiment& experiment, const PolicySpec& policy) {
  std::vector<std::string> params;
  for (const PolicySpec& other : experiment.policies)
    if (other.name == policy.name) params.push_back(to_json(other).dump());
  const std::string varying = varying_text(to_json(policy).dump(), params);
  return varying.empty() ? policy.name : policy.name + " " + varying;
}

std::string task_label(const TaskSpec& task) {
  return task.question == Question::decode ? task.name + " question=decode" : task.name;
}

std::string workload_label(const Experiment& experiment, const Cell& cell) {
  return experiment.workloads.empty() ? "" : ", " + experiment.workloads[cell.workload].text();
}

}  // namespace kvlab
