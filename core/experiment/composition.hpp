// The composition keys of a policy entry: budget, schedule and placement.
#pragma once
#include "experiment/plugin_use.hpp"
#include "experiment/policy_spec.hpp"

namespace kvlab {

// budget: {tokens | ratio | bytes: AMOUNT, split: NAME}. split_alone: the amount comes from elsewhere.
void read_budget(const yaml::Node& node, UseReader& uses, PolicySpec& policy, bool split_alone);
// schedule: {prefill: BOOL, every: N}
void read_schedule(const yaml::Node& node, Problems& problems, Schedule& out);
// placement: {tier: WORD, resident: N, codec: NAME}
void read_placement(const yaml::Node& node, UseReader& uses, Placement& out);

}  // namespace kvlab
