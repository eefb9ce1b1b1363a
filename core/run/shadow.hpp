// Fidelity per layer without a data set. A second store keeps all keys and values of the policy run. The run's own
// queries attend to all of it, which shows what the policy's attention missed. It follows one sequence, outside the
// policy's ledger.
#pragma once
#include <memory>
#include <vector>

#include "engine/engine.hpp"
#include "engine/host_copy.hpp"
#include "store/store.hpp"

namespace kvlab {

class Shadow final : public EngineObserver {
 public:
  // Follows the sequence in the engine's slot 0. max_tokens as the engine's. `beside`, the engine's store: the copy
  // lies on its device where that has room for it three times, and where keys are rotated by text position. Else it is
  // on the host.
  Shadow(const Model& model, int page_size, int max_tokens, const Store* beside = nullptr);

  // Forgets the sequence. A new one starts at position 0.
  void reset();
  // The sequence as it is now, for a later one that begins with it: in place of the prompt, after reset().
  std::vector<std::byte> save() const { return store_->save(0); }
  Fit restore(const std::vector<std::byte>& saved) { return store_->restore(0, saved); }
  // The next decode steps, so many, are not compared: take() has no rows of them. Below 0 is none.
  void skip(int steps) { skipped_ = steps > 0 ? steps : 0; }

  Prompt reads_of_prompt() const override { return store_->cuda() ? Prompt::in_place : Prompt::keys_and_values; }
  bool steps_in_place() const override { return store_->cuda() != nullptr; }
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
  // What one KV head misses in a step.
  struct Head {
    std::vector<char> seen, chosen;  // of the tokens and of the pages: attended to
    std::vector<double> page_mass;   // of full attention, all query heads of the group
    std::vector<std::size_t> order;  // of pages: those of largest mass first, as many as chosen ones
    double missed = 0, recall = 0;
  };
  static void compare(Head& head, const float* mass, int group, int page_size);

  void append(const LayerRows& l, int first);
  DecodeLayer read_part(DecodeLayer l, Stream s);
  void compare_step(const DecodeLayer& here, const Store& store, int total);  // of a copy on the host
  void attend_to_all(int layer, const float* queries, int newest);            // sets output_ and mass_
  const float* original(const View<const float, 3>& rotated, const View<const float, 3>& raw, int first,
                        std::vector<float>& buffer) const;

  void add(double mass, double page_recall, double output_error);
  bool finite(int layer, const float* ours);  // whether full attention's mass and output, and `ours`, are finite

  const Model& model_;
  std::unique_ptr<Store> store_;
  StreamMemory step_;  // on a GPU: output, mass and position
  HostCopy copy_;
  std::vector<std::int32_t> slots_{0};
  int skipped_ = 0;  // steps still to come
  std::vector<float> queries_, keys_, output_, mass_;
  std::vector<Head> heads_;
  Rows rows_;
};

}  // namespace kvlab
