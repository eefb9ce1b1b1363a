// Texts that tell the policies and tasks of one experiment apart in tables.
#pragma once
#include <string>

namespace kvlab {

struct Cell;
struct Experiment;
struct PolicySpec;
struct TaskSpec;

// "snapkv window=8": the entry's label and the parameters that differ among the experiment's entries of that label.
std::string policy_text(const Experiment& experiment, const PolicySpec& policy);

// "niah", or "niah question=decode" when the policy does not see the question: its scores differ, so its name does.
std::string task_label(const TaskSpec& task);

// ", 64 requests, poisson 2/s", or nothing without a workload.
std::string workload_label(const Experiment& experiment, const Cell& cell);

}  // namespace kvlab
