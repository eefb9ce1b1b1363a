// One entry of `policies:` or `tasks:`, resolved to plugins with all their parameters.
//
// A policy entry is a name (`full`), {NAME: {...}} or {name: LABEL, scorer: X, ...}. Its composition keys are policy,
// scorer, selector, pruner, rescorer, budget, schedule, codec, placement, page_size and profile. Every other key is a
// parameter of its main plugin: the one called NAME, else the only one of policy, scorer and selector.
#pragma once
#include <kvlab/policy.hpp>

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "experiment/plugin_use.hpp"

namespace kvlab {

struct Schedule {
  bool prefill = true;       // compress when the prompt ends
  std::optional<int> every;  // decode steps between evictions; 0 = never; nothing = as the scorer says
};

struct Placement {
  Tier tier = Tier::device;
  int resident = 0;  // tokens per KV head that stay on the device; at least those that attention reads
  std::optional<PluginUse> codec;
};

struct PolicySpec {
  std::string name;                                   // the entry's label
  std::optional<PluginUse> policy, scorer, selector;  // none of them = `full`, the null policy
  std::optional<PluginUse> pruner;                    // of what a step reads
  std::optional<PluginUse> rescorer;                  // of the scorer's tokens at a prompt's end
  BudgetAmount budget;
  std::optional<PluginUse> split;  // of the budget; nothing = uniform
  Schedule schedule;
  std::optional<PluginUse> codec;
  Placement placement;
  int page_size = 16;
  std::string profile;  // a profile file, relative as data paths are; empty: none
  std::string ablated;  // the component that `without` switched off; empty: none
  std::string where;    // the entry's place, for messages
};

// Calls visit(use) with each plugin of the policy, const or not.
template <class Policy, class Visit>
void for_each_use(Policy& policy, Visit visit) {
  for (auto* use : {&policy.policy, &policy.scorer, &policy.selector, &policy.pruner, &policy.rescorer, &policy.split,
                    &policy.codec, &policy.placement.codec})
    if (use->has_value()) visit(**use);
}

enum class Question : std::uint8_t { prompt, decode };  // seen before the policy compresses, or after

struct TaskSpec {
  std::string name;  // the entry's label
  PluginUse task;
  std::optional<PluginUse> metric;  // the entry's, else the one that the task names; nothing = the task's own
  bool names_metric = false;        // the entry does: the task's own is not asked
  Question question = Question::prompt;
  int questions = 1;
  int turns = 1;                     // questions of one conversation, in which each follows the one before
  std::optional<std::int64_t> seed;  // in place of the experiment's
  std::string where;
};

// `entry` holds no lists (expand_axes). Nothing, and notes, when it is wrong. amount_follows: its budget may be a split
// without an amount, because equal_bytes gives one.
std::optional<PolicySpec> read_policy(const yaml::Node& entry, int page_size, const PluginCatalog&, Problems&,
                                      bool amount_follows = false);
std::optional<TaskSpec> read_task(const yaml::Node& entry, const PluginCatalog&, Problems&);

// The metric of this name with its defaults; nothing when there is none.
std::optional<PluginUse> metric_named(const std::string& name, const PluginCatalog&);

// `policy` with the named component switched off, labelled "LABEL -COMPONENT"; nothing when no plugin of it declares
// that component or it is off already.
std::optional<PolicySpec> without(const PolicySpec& policy, const std::string& component, const PluginCatalog&);
// Components that the policy's plugins declare.
std::vector<std::string> components(const PolicySpec& policy, const PluginCatalog&);

// Every resolved value in a fixed order, for the `params` column and a cell's id.
nlohmann::ordered_json to_json(const Params& params);
nlohmann::ordered_json to_json(const PolicySpec& policy);
nlohmann::ordered_json to_json(const TaskSpec& task);

}  // namespace kvlab
