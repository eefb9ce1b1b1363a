// The cells of an output that several processes run at the same time. A part that appears ends its cell for all of
// them.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "experiment/experiment.hpp"
#include "run/claims.hpp"
#include "run/workers.hpp"

namespace kvlab {

class SharedCells {
 public:
  // strict: a process that cannot claim a cell must not run it. A run without workers may: it warned already that it
  // would not notice another run.
  // It notes the parts of the cells that are there.
  SharedCells(std::string out, bool strict, const std::vector<std::string>& ids);

  // Whether the cell's part has appeared since the run began.
  bool finished(const std::string& id) const;
  // Nothing while another process runs the cell. Without locks and not strict: a claim that holds nobody off.
  std::optional<Claim> claim(const std::string& id) const;

  // The part that the cell had at the start does not count: the run replaces it. known: the one that it has now.
  void replaces(const std::string& id, bool known);
  void tell_workers() const;  // which parts these are
  void ask_run();             // the worker's side
  void tidy() const;          // removes what workers need beside the parts

  const std::string& folder() const { return folder_; }
  std::string part(const std::string& id) const;

 private:
  std::string out_, folder_;
  bool strict_;
  std::map<std::string, std::string> first_;  // of the parts at the start: inode and time
  std::map<std::string, std::string> old_;    // of the parts that do not count
};

// What a run hears of its workers.
class WorkersHeard {
 public:
  virtual ~WorkersHeard() = default;
  virtual void finished(const Cell& cell) = 0;                              // its part is there
  virtual void waiting(std::size_t running, const std::string& where) = 0;  // several times a second
};

// Lets workers run the cells, until all parts are there, no worker is left, or a signal has stopped the workers. Where
// workers ended while they ran a cell, others take their place. Returns the cells without a part.
std::vector<const Cell*> run_by_workers(const Spread& spread, const Experiment& e, const std::string& cells_hash,
                                        std::vector<const Cell*> left, const SharedCells& shared, WorkersHeard& heard);

}  // namespace kvlab
