// `kvlab reproduce`: the tables and figures of papers, and of our own targets, as commands.
#pragma once
#include <string>
#include <vector>

#include "run/runner.hpp"

namespace kvlab {

struct ReproduceOptions {
  std::vector<std::string> items;  // "PAPER/ITEM" or "targets/NAME" to run; "PAPER", "targets" or nothing = a list
  std::string model, adapter;      // in place of the experiments' models; empty: theirs
  std::vector<std::string> sets, plugin_path;
  std::vector<std::string> only;  // rows of a table of targets; empty: all
  double within = 0;              // of targets: begin no command that may end later than so many seconds; 0 = no limit
  std::string folder = "results/reproduce", format = "table";
  bool small = false;   // the experiments that need no more than what is at hand
  bool check = false;   // run nothing
  bool report = false;  // run nothing, show what there is
  bool quiet = false;
  RunOptions run = {};  // of every experiment
};

// Runs each item's experiments and prints our values beside the published ones. Workers run the cells of all items in
// one pool. Returns 0, or 1 when a cell failed. An unknown item is Errc::config. Errors of experiments pass through,
// after a line with what the item needs.
int reproduce(const ReproduceOptions& options);

}  // namespace kvlab
