// Runs of the full cache that come before a cell's own, for policies that look into the future (Needs::future_mass).
// They answer every question and turn of a sample as PlainPass does, and keep the attention mass of each decode step.
//
// The kept numbers take layers x KV heads x (tokens in the cache, summed over all steps) x 4 bytes of host memory for
// each conversation. With 30 layers, 3 KV heads, 8192 tokens of prompt and 64 steps this is 189 MB. Samples are kept
// for the passes that follow, as long as all take at most 1 GiB; those that a batch needs are there at once.
//
// A run takes memory for a full cache beside the policy's own. No ledger and no time of the cell has it. It asks
// attention for its mass, which the full cache's answers of fidelity do not. So a near tie between two tokens may be
// decided otherwise on a GPU, and the recorded text is then not the one that fidelity forces.
#pragma once
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "engine/foresight.hpp"

namespace kvlab {

struct CellInput;

class FullRuns final : public RecordedMass {
 public:
  // Runs the samples that are not there. Answers that are not forced have at most `most` tokens. Throws OutOfMemory
  // where the full cache does not fit, and as Engine does.
  void prepare(const CellInput& in, const std::set<int>& samples, int most = std::numeric_limits<int>::max());

  std::span<const float> from(std::uint32_t question, bool prompt, int step, int layer, int head) const override;

  int runs() const { return runs_; }  // samples that were run
  std::int64_t bytes() const;         // of the samples that are kept

 private:
  // A sequence: a question and the turns that follow it.
  struct Conversation {
    int layers = 0, kv_heads = 0;
    std::vector<std::vector<float>> mass;  // [step][layer, KV head, token] sum of the step and all later ones

    std::int64_t bytes() const;
    void sum_later_steps();
    std::span<const float> from(int step, int layer, int head) const;
  };
  struct Sample {
    int most = 0;
    std::int64_t bytes = 0, used = 0;                                            // used: when it was asked for
    std::map<std::uint32_t, std::shared_ptr<const Conversation>> conversations;  // by question
    std::vector<float> shared;  // [layer, KV head, prompt token] sum of the conversations; empty if they share no cache
  };
  class Recorder;

  Sample run(const CellInput& in, int sample, int most) const;

  std::map<int, Sample> samples_;
  std::int64_t asked_ = 0;
  int runs_ = 0;
};

}  // namespace kvlab
