// Fidelity per layer without a data set. A second store keeps all keys and values of the policy run. The run's own
// queries attend to all of it, which shows what the policy's attention missed. It follows one sequence, outside the
// policy's ledger.
#pragma once
#include <memory>
#include <vector>

#include "engine/engine.hpp"
#include "engine/host_copy.hpp"
#include "store/store.hpp"
#include "store/workspace.hpp"

namespace kvlab {

class Shadow final : public EngineObserver {
 public:
  // Follows the sequence in the engine's slot 0. max_tokens as the engine's. `beside`, the engine's store, which an
  // engine on a GPU must give: the copy lies on its device where that has room for it three times, and where keys are
  // rotated by text position. Else, and with on_host, it is on the host.
  Shadow(const Model& model, int page_size, int max_tokens, const Store* beside = nullptr, bool on_host = false);

  // Forgets the sequence. A new one starts at position 0.
  void reset();
  // The sequence as it is now, for a later one that begins with it: in place of the prompt, after reset().
  std::vector<std::byte> save() const { return store_->save(0); }
  Fit restore(const std::vector<std::byte>& saved) { return store_->restore(0, saved); }
  // The next decode steps, so many, are not compared: take() has no rows of them. Below 0 is none.
  void skip(int steps) { skipped_ = steps > 0 ? steps : 0; }

  Prompt reads_of_prompt() const override { return store_->cuda() ? Prompt::in_place : Prompt::keys_and_values; }
  bool steps_in_place() const override { return in_place_; }
  void prompt(const PromptLayer& l, const Store& store) override;
  void attended(const DecodeLayer& l, const Store& store) override;

  // Of the decode steps since the last take, [step, layer] each:
  // mass: share of the full attention's probability on positions that the policy attended to, mean over query heads;
  // page_recall: with n pages (text position / page_size) attended to by a KV head, the share of them among the n pages
  //   of largest full attention mass, mean over KV heads;
  // output_error: ||policy's attention output - full's|| / ||full's||, all heads together.
  // Where attention has numbers that are NaN or infinite, all three of the layer are NaN, and nonfinite counts them.
  struct Rows {
    std::vector<float> mass, page_recall, output_error;
    std::int64_t nonfinite = 0;
    int layer = -1;  // the first one with such numbers
  };
  Rows take();

 private:
  struct Layout;
  // What one layer's attention missed in a step.
  struct Compared {
    std::int64_t nonfinite = 0;
    double missed = 0, recall = 0, output_error = 0;  // of all query heads, of all KV heads
  };

  void append(const LayerRows& l, int first);
  void attend_to_all(int layer, const float* queries, int newest);
  const DecodeLayer& copied_rows(DecodeLayer l, Stream s);
  void note_layer(const DecodeLayer& l, const Store& store, int total);
  void compare_step(int total, Stream s);
  Layout layout(int total) const;
  Compared compare(const std::byte* from, const Layout& at) const;
  static double recall(const double* mass, const std::int32_t* read, std::int64_t pages);
  const float* original(const View<const float, 3>& rotated, const View<const float, 3>& raw, int first,
                        std::vector<float>& buffer) const;

  const Model& model_;
  std::unique_ptr<Store> store_;
  bool in_place_;                              // steps come as memory of a GPU
  Ledger ledger_;                              // of scratch_ alone
  StoreWorkspace scratch_;                     // on the policy's device
  StreamMemory step_;                          // on the copy's device: output, mass and position
  float *output_ = nullptr, *mass_ = nullptr;  // in step_
  StreamMemory figures_, mass_there_;          // on the policy's device: the step's layers; a copy of the mass
  HostCopy copy_;
  DecodeLayer here_;
  std::vector<std::int32_t> slots_{0};
  int skipped_ = 0;  // steps still to come
  std::vector<float> queries_, keys_;
  std::vector<std::byte> host_;
  std::vector<Compared> compared_;
  Rows rows_;
};

}  // namespace kvlab
