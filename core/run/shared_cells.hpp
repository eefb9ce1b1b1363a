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

}  // namespace kvlab
