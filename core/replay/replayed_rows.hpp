// The rows of one recorded case at a time, for the engine.
#pragma once
#include <limits>
#include <memory>
#include <vector>

#include "exec/recorded_rows.hpp"
#include "replay/recording_file.hpp"

namespace kvlab {

class ReplayedRows final : public RecordedRows {
 public:
  // cases: of the recording, as `use` numbers them.
  ReplayedRows(std::shared_ptr<const Recording> recording, std::vector<std::size_t> cases)
      : recording_(std::move(recording)), cases_(std::move(cases)) {}

  const Recording& recording() const { return *recording_; }
  const RecordedCase& of(std::size_t i) const { return recording_->cases()[cases_[i]]; }
  std::size_t number(std::size_t i) const { return cases_[i]; }  // of the recording
  std::size_t count() const { return cases_.size(); }
  void use(std::size_t i);  // the sequence that runs next is this case

  void read(int layer, std::int64_t first, std::int64_t n, float* queries, float* keys, float* values) const override;
  Prompt prompt(int layer) const override;
  std::span<const float> prompt_mass(int layer) const override;

 private:
  std::shared_ptr<const Recording> recording_;
  std::vector<std::size_t> cases_;
  std::size_t used_ = std::numeric_limits<std::size_t>::max();
  std::shared_ptr<const RecordedLayers> layers_;
};

}  // namespace kvlab
