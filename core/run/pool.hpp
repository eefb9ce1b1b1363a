// A pool: the cells of one experiment, or of several, that the same workers run. So no worker is idle while any of the
// experiments has a cell left.
#pragma once
#include <string>
#include <vector>

#include "experiment/experiment.hpp"
#include "run/progress.hpp"
#include "run/shared_cells.hpp"
#include "run/workers.hpp"

namespace kvlab {

// What the run of an experiment hears of its workers.
class WorkersHeard {
 public:
  virtual ~WorkersHeard() = default;
  virtual void finished(const Cell& cell) = 0;  // its part is there
};

// An experiment of a pool, as the run that waits for its cells has it.
struct PoolWork {
  const Experiment* experiment;
  std::string cells_hash;
  const SharedCells* shared;
  std::vector<const Cell*> left;  // cells without a part
  WorkersHeard* heard;
};

// Lets workers run the cells, until all parts are there, no worker is left, or a signal has stopped the workers. Where
// workers ended while they ran a cell, others take their place. CannotStart where the first workers cannot be started.
void run_by_workers(const Spread& spread, std::vector<PoolWork>& all, Progress& progress);

}  // namespace kvlab
