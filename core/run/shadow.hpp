// Fidelity per layer without a data set. A second store keeps all keys and values of the policy run. The run's own
// queries attend to all of it, which shows what the policy's attention missed. It lies outside the policy's ledger.
#pragma once
#include <memory>
#include <vector>

#include "engine/engine.hpp"
#include "engine/host_copy.hpp"
#include "run/replay_shared.hpp"
#include "store/store.hpp"
#include "store/workspace.hpp"

namespace kvlab {

class Shadow final : public EngineObserver {
 public:
  // Follows the sequences in the engine's slots 0 to slots - 1. max_tokens as the engine's. `beside`, the engine's
  // store, which an engine on a GPU must give: the copy lies on its device where that has room for it three times, and
  // where keys are rotated by text position. Else, and with on_host, it is on the host.
  struct Where {
    const Store* beside = nullptr;
    int slots = 1;
    bool on_host = false;
  };
  Shadow(const Model& model, int page_size, int max_tokens, Where where);
  Shadow(const Model& model, int page_size, int max_tokens) : Shadow(model, page_size, max_tokens, Where{}) {}

  // How many sequences, at most `want` and at least one, a GPU's free memory holds whole four times: the policy's and
  // the copy, each at most, the full cache's own run, and scratch.
  static int most_slots(const Model& model, int page_size, int max_tokens, int want);

  // After reset(), of one slot on the CPU: what attention to all tokens leaves of the sequence's compared steps comes
  // from `known`, and no copy is kept; or it goes to `noted`, too. Borrows them until the next reset.
  void use(const FullAttention* known) { known_ = known; }
  void note(FullAttention* noted) { noted_ = noted; }

  // Forgets the slot's sequence. A new one starts at position 0.
  void reset(int slot = 0);
  // The sequence as it is now, for a later one that begins with it: in place of the prompt, after reset().
  std::vector<std::byte> save(int slot = 0) const { return store_->save(slot); }
  Fit restore(const std::vector<std::byte>& saved, int slot = 0) { return store_->restore(slot, saved); }
  // The slot's next decode steps, so many, are not compared: take() has no rows of them. Below 0 is none.
  void skip(int steps, int slot = 0) { slots_[static_cast<std::size_t>(slot)].skipped = steps > 0 ? steps : 0; }

  Prompt reads_of_prompt() const override { return store_->cuda() ? Prompt::in_place : Prompt::keys_and_values; }
  bool steps_in_place() const override { return in_place_; }
  void prompt(const PromptLayer& l, const Store& store) override;
  void attended(const DecodeLayer& l, const Store& store) override;

  // Of the slot's decode steps since the last take, [step, layer] each:
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
  Rows take(int slot = 0);

 private:
  struct Layout;
  struct Slot {
    int skipped = 0;  // steps still to come
    Rows rows;
  };
  // What one row's layer missed in a step.
  struct Compared {
    std::int64_t nonfinite = 0;
    double missed = 0, recall = 0, output_error = 0;  // of all query heads, of all KV heads
  };

  void append(const LayerRows& l, int slot, int row, int rows, int first);
  void attend_to_all(const LayerRows& l);
  void note_layer(const DecodeLayer& l, const Store& store);
  void note_all(const std::byte* from, const Layout& at);
  void compare_step(Stream s);
  Layout layout(int rows, int total) const;
  Compared compare(int layer, const std::byte* from, const Layout& at, int row) const;
  static double recall(const double* mass, const std::int32_t* read, std::int64_t pages);
  static double known_recall(const std::int32_t* rank, const std::int32_t* read, std::int64_t pages);
  const FullAttention::Layer& known(int layer) const;
  void rotate(const View<const float, 3>& raw, int row, int position, float* to) const;

  const Model& model_;
  std::unique_ptr<Store> store_;
  bool in_place_;           // steps come as memory of a GPU
  Ledger ledger_;           // of scratch_ alone
  StoreWorkspace scratch_;  // on the policy's device
  StreamMemory step_;       // on the copy's device: output, mass and newest position of each row
  const float *output_ = nullptr, *mass_ = nullptr;  // in step_, or known
  StreamMemory figures_, there_;  // on the policy's device: figures of a step's layers; a copy of step_
  HostCopy copy_;
  const FullAttention* known_ = nullptr;
  FullAttention* noted_ = nullptr;
  std::size_t compared_steps_ = 0;  // since reset()
  std::vector<Slot> slots_;
  std::vector<std::int32_t> of_rows_;  // the step's slots
  std::vector<std::int32_t> newest_;   // their newest text positions
  int total_ = 0;                      // one more than the greatest of these
  std::vector<float> queries_, keys_;
  std::vector<std::byte> host_;
  std::vector<Compared> compared_;
};

}  // namespace kvlab
