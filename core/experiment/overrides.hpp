// `--set key=value` and `sweep:` write values into the YAML tree before anything is read from it.
#pragma once
#include <string>

#include "experiment/reader.hpp"

namespace kvlab {

// path: a top-level key and the keys below it ("backend", "model.dtype", "tasks.niah.context"). Or the label of an
// entry of policies or tasks and a key in it ("snapkv.window", "niah.context", "snapkv.budget.tokens"): every entry of
// that label is changed. Keys on the way are created. Messages point to `place`.
void set_path(yaml::Node& root, const std::string& path, const yaml::Node& value, yaml::Place place,
              Problems& problems);

// Apply the document's `sets` in order, then its `sweep`.
void apply_sets(yaml::Document& document, Problems& problems);
void apply_sweep(yaml::Node& root, Problems& problems);

}  // namespace kvlab
