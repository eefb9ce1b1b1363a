// The cache of an engine on a GPU once more in host memory, for callbacks that read views there: profilers. It observes
// the engine and takes what is appended; nothing may edit the cache, and keys lie at their text positions.
#pragma once
#include "engine/engine.hpp"
#include "store/cpu_store.hpp"

namespace kvlab {

class HostMirror final : public EngineObserver {
 public:
  // Shape and summaries of the engine's store. A cache of f16 is one of f32 here, of the same values.
  HostMirror(const Shape& shape, Summary summary);

  const Shape& shape() const { return store_.shape(); }
  Workspace& workspace() { return store_.workspace(); }
  void release(int slot);  // what it held is gone

  // What the engine gave a policy's callback, with views of host memory; not the budgets of a step's pages. They live
  // until the engine goes on; the stream is the engine's.
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
  PagedKv pages_;                         // what KvRows of the callback point to
  std::vector<float> keys_, values_;      // rounded
  std::vector<std::uint32_t> questions_;  // [slot]
};

}  // namespace kvlab
