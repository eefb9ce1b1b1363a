// Gives a policy's callback the attention mass that is still to come (LayerKv::future_mass), from what a run of the
// full cache left.
#pragma once
#include <kvlab/policy.hpp>

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "base/stream_memory.hpp"
#include "store/store.hpp"

namespace kvlab {

// What runs of the full cache attended to. Those who run an engine have it (EngineOptions::recorded).
class RecordedMass {
 public:
  virtual ~RecordedMass() = default;
  // [text position] the mass of decode steps `step` and later of the question's sequence, for a KV head; shorter than
  // the text where later tokens get none. step: 0 = the first after the prompt. question: as Engine::ask numbers them.
  // prompt: the steps of all questions that share the prompt's cache; `step` is then 0. Throws where nothing of the
  // question was recorded.
  virtual std::span<const float> from(std::uint32_t question, bool prompt, int step, int layer, int head) const = 0;
};

class Foresight final : public FutureMass {
 public:
  // questions: [slot] as the engine numbers them. Borrows all three.
  Foresight(const RecordedMass& recorded, const Store& store, const std::vector<std::uint32_t>& questions)
      : recorded_(recorded), store_(store), questions_(questions) {}
  Foresight(const Foresight&) = delete;
  Foresight& operator=(const Foresight&) = delete;

  View<const float, 3> of(const LayerKv& kv) const override;

 private:
  using Step = std::vector<std::array<std::int32_t, 3>>;  // [row] slot, text position, decode step
  std::vector<float> table(const LayerKv& kv, int first, int layers, int text) const;

  const RecordedMass& recorded_;
  const Store& store_;
  const std::vector<std::uint32_t>& questions_;
  // On a GPU: the step whose numbers all_ has, [layer, row, KV head, text position], and the layer that came last.
  // No ledger counts it: an oracle's foresight is no memory of a method.
  mutable StreamMemory all_;
  mutable Step now_;
  mutable int last_layer_ = -1;
};

}  // namespace kvlab
