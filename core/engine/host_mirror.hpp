// A copy in host memory of the cache of an engine on a GPU, for profilers, which read views there. It observes the
// engine and appends the same tokens. Nothing may edit the cache, and keys lie at their text positions.
#pragma once
#include "engine/engine.hpp"
#include "store/cpu_store.hpp"

namespace kvlab {

class HostMirror final : public EngineObserver {
 public:
  // Takes the shape and summaries of the engine's store. A cache of f16 becomes one of f32 with the same values.
  HostMirror(const Shape& shape, Summary summary, int summary_bits = 16);

  const Shape& shape() const { return store_.shape(); }
  Workspace& workspace() { return store_.workspace(); }
  void release(int slot);  // drops the slot's tokens

  // Replaces the views of a callback's argument by views of host memory; page_budgets is empty. The views live until
  // the engine goes on. s is the engine's stream.
  LayerPrefill of(const LayerPrefill& l, Stream s);
  LayerStep of(const LayerStep& l, Stream s);

  Prompt reads_of_prompt() const override { return Prompt::keys_and_values; }
  void prompt(const PromptLayer& l, const Store& store) override;
  void attended(const DecodeLayer& l, const Store& store) override;

 private:
  void append(int layer, int slot, const float* keys, const float* values, std::int64_t tokens, int first);
  void point_to_host(LayerKv& kv, Stream s);

  DType dtype_;  // of the engine's cache
  CpuStore store_;
  HostCopy copy_;
  DecodeLayer seen_;                      // the layer that was attended last
  std::vector<std::int32_t> slots_;       // of the callback
  PagedKv pages_;                         // KvRows of the callback point to it
  std::vector<float> keys_, values_;      // rounded to f16
  std::vector<std::uint32_t> questions_;  // [slot]
  std::vector<float> inv_freq_;           // of the model's RoPE
};

}  // namespace kvlab
