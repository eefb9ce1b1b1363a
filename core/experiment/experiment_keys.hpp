// The top-level keys of an experiment file, each declared once. The reader, `--set`, messages, cell ids and the
// editor's schema follow from this list.
#pragma once
#include <kvlab/params.hpp>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "experiment/experiment.hpp"

namespace kvlab {

struct ExperimentKey {
  std::string name, help;

  // A plain key holds one number or switch. Its field has the default; a new plain key needs no other line than its
  // own. The other keys are read by experiment.cpp and described by schema.cpp.
  std::optional<ParamSpec> plain = {};
  std::function<void(Experiment&, const Params&)> set = {};
  std::function<ParamValue(const Experiment&)> get = {};
  bool in_id = false;  // results depend on it
};

const std::vector<ExperimentKey>& experiment_keys();  // in the order of messages
std::vector<std::string> experiment_key_names();

}  // namespace kvlab
