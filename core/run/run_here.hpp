// Runs cells in this process, with the weights of one model at a time.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/finite.hpp"
#include "result/results.hpp"
#include "run/cell_input.hpp"
#include "run/prepare.hpp"

namespace kvlab {

// One model at a time holds its weights. Its files are closed once they are read.
class ModelInUse {
 public:
  ModelInUse(const Experiment& e, Prepared& prepared) : e_(e), prepared_(prepared) {}

  // Throws NoRoom where the weights do not fit and NonFinite where some are not finite. Later calls throw the same
  // without another try.
  void need(std::size_t model);
  std::shared_ptr<const Model> model(std::size_t model) const { return prepared_.models[model]; }

 private:
  const Experiment& e_;
  Prepared& prepared_;
  std::shared_ptr<const Model> outline_;
  std::map<std::size_t, std::string> no_room_;  // models that did not fit
  std::map<std::size_t, NonFinite> nonfinite_;  // models with such weights
  std::size_t model_ = 0;
};

// Loads the cell's model and runs the cell. Its times are labelled where another process of this machine ran a cell of
// these outputs meanwhile. folders: their OUT.parts. strict: it runs the cell again while other programs disturb it.
// Cells beside each other are no reason: they would be beside each other again.
results::CellResult run_here(const CellInput& in, ModelInUse& models, const std::vector<std::string>& folders,
                             bool strict);

// Writes the cell's part; CannotGoOn where that fails.
void put_on_disk(const std::string& out, const results::CellResult& result, const results::RunInfo& info);

void want_reserve();  // NoRoom without memory for what ends a run in order

}  // namespace kvlab
