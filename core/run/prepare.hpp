// A run's work before its first cell. `kvlab check` and each process of --isolate do the same.
#pragma once
#include <kvlab/error.hpp>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "experiment/experiment.hpp"
#include "model/model.hpp"
#include "run/cell_input.hpp"
#include "run/items.hpp"
#include "run/recorded.hpp"

namespace kvlab {

using ItemsKey = std::tuple<std::size_t, std::size_t, std::int64_t>;  // model, task, seed

using ProfileKey = std::tuple<std::size_t, std::string, int>;  // model, file as the entry names it, page size

// An experiment that has passed every check.
struct Prepared {
  std::vector<std::unique_ptr<Checkpoint>> checkpoints;
  std::vector<std::shared_ptr<const Model>> models;  // only the one in use has its weights
  std::vector<Cell> cells;
  std::map<ItemsKey, TaskItems> items;
  std::map<ProfileKey, std::shared_ptr<const Profile>> profiles;
  std::shared_ptr<const RecordedTrace> recorded;
  std::shared_ptr<const Recording> recording;   // null unless one is replayed
  std::shared_ptr<ReplayShared> replay_shared;  // the same
};

// Finds errors before anything is run or written. An ExperimentError holds all messages of the cells, each once. only:
// the id of one cell; empty = all cells. later: profile files that are still to be made, absolute; what depends on
// their contents is not checked, the cells' ids among it.
Prepared prepare(const Experiment& experiment, const PluginCatalog& catalog, const std::string& only = {},
                 const std::set<std::filesystem::path>& later = {});

// A cell's input, without references and progress. Borrows its arguments.
CellInput input(const Experiment& experiment, const PluginCatalog& catalog, const Prepared& prepared, const Cell& cell);

// Runs body(). An error that does not begin with its place in the experiment file gets `where` in front.
template <class Body>
void placed(const std::string& where, Body body) {
  try {
    body();
  } catch (const Error& error) {
    if (error.where().starts_with(where)) throw;
    throw Error(error.code(), error.message(), error.where().empty() ? where : where + ": " + error.where());
  }
}

}  // namespace kvlab
