// Takes what a recording holds from an engine that runs the full cache.
#pragma once
#include <vector>

#include "engine/engine.hpp"
#include "replay/recording_file.hpp"

namespace kvlab {

// The full cache, whose prompts leave their attention mass.
class RecordedCache final : public Policy {
 public:
  Needs needs() const override { return Needs{}.mass(Mass::all); }
};

// Follows one sequence after the other, whole prompts, on the CPU.
class Recorder final : public EngineObserver {
 public:
  void prompt(const PromptLayer& l, const Store& store) override;
  void attended(const DecodeLayer& l, const Store& store) override;
  RecordedLayers take();  // of the sequence so far, and forgets it

 private:
  struct Layer {
    std::vector<float> prompt_queries, step_queries, keys, values, mass;
  };
  std::vector<Layer> layers_;
};

}  // namespace kvlab
