// Runs one cell: a plain pass over all items (answers, times, ledger, trace), then, when fidelity is asked for, an
// instrumented pass on the full cache's tokens.
#pragma once
#include <functional>
#include <memory>

#include "engine/engine.hpp"
#include "experiment/experiment.hpp"
#include "result/results.hpp"
#include "run/items.hpp"
#include "run/reference.hpp"

namespace kvlab {

std::shared_ptr<Policy> build_policy(const PolicySpec& spec, const PluginCatalog& catalog);

struct CellInput {
  const Experiment* experiment = nullptr;
  const Cell* cell = nullptr;
  std::shared_ptr<const Model> model;
  const TaskItems* items = nullptr;
  const PluginCatalog* catalog = nullptr;
  ReferenceCache* references = nullptr;
  std::function<void(const std::string& what, int done, int total)> progress;  // items, per pass
};

// Everything that can be wrong before work starts: roles, budget, needs, context. Throws as Engine does.
void check_cell(const CellInput& in);

// Never throws for what happens inside the cell: an Error becomes status "failed", not fitting "oom".
results::CellResult run_cell(const CellInput& in);

}  // namespace kvlab
