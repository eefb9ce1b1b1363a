// The options of `kvlab run` and `kvlab reproduce` that let several processes run the cells.
#pragma once
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "run/runner.hpp"

namespace kvlab {

class SpreadWords {
 public:
  void add_to(CLI::App* run);
  void add_starters_to(CLI::App* command);  // of those, the ones that start workers and wait for them
  // typed: the words of the command. Errc::config where options do not fit together.
  void apply(RunOptions& options, const std::vector<std::string>& typed) const;

 private:
  Spread spread() const;  // the workers that are asked for, but for their command
  int jobs_ = 0;
  bool no_wait_ = false, worker_ = false;
  std::string on_, slurm_args_, mpi_args_, worker_of_;
};

// The words without those that kvlab put in when it started this process.
std::vector<std::string> as_typed(std::vector<std::string> words);

}  // namespace kvlab
