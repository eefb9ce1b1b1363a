// Model, store and policy put together: sequences live in slots, prompts are prefilled, decode steps run batched and
// ragged.
#pragma once
#include <kvlab/policy.hpp>

#include <array>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "base/finite.hpp"
#include "base/part_timer.hpp"
#include "base/stream_memory.hpp"
#include "engine/host_copy.hpp"
#include "exec/executor.hpp"

namespace kvlab {

struct EngineOptions {
  Device device = Device::cpu;
  int slots = 1;
  int max_tokens = 0;  // per sequence, prompt and output
  int page_size = 16;
  int prefill_chunk = 0;  // prompt tokens per chunk; 0 = the whole prompt, layer by layer
  BudgetAmount budget;
  std::int64_t device_limit = -1;
  bool batch_invariant = false;  // make_executor
  bool graphs = true;            // on a GPU: decode steps may be launched as graphs, of which no part can be timed
  bool protect_host = false;     // tests: the host tier is unreadable while attention runs
};

// Sees what passes through the engine; for measurement. Everything is borrowed for the call and host memory; of the
// store only what is exact on either device is asked for, no views.
class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  // What of a prompt's layers it reads: the rest need not come from a GPU.
  enum class Prompt : std::uint8_t { nothing, keys_and_values, everything };
  virtual Prompt reads_of_prompt() const { return Prompt::everything; }
  virtual void prompt(const PromptLayer&, const Store&) {}
  virtual void attended(const DecodeLayer&, const Store&) {}  // before the policy's own observe and its edits
};

// What a slot was given since it was opened: `tokens` of a prompt in one call, or decode steps of one token each.
struct Given {
  std::vector<int> tokens;
  bool prompt = false, end = false;  // end: the prompt ended here
};

// A sequence to go on with in another slot.
struct SavedSequence {
  std::vector<std::byte> cache;
  std::vector<Given> given;
};

// A call of which numbers were not finite, with what it takes to come to it again (run/nonfinite.hpp).
class NonFiniteStep final : public NonFinite {
 public:
  struct Row {
    std::uint32_t sequence = 0, question = 0;
    std::vector<Given> given;
  };
  // rows: those that were not finite, at least one.
  explicit NonFiniteStep(std::vector<Row> rows);
  const std::vector<Row>& rows() const noexcept { return rows_; }

 private:
  std::vector<Row> rows_;
};

class Engine final : private LayerHooks {
 public:
  // Errc::config and Errc::unsupported for needs that this engine cannot meet.
  Engine(std::shared_ptr<const Model> model, std::shared_ptr<Policy> policy, const EngineOptions& options);

  // The same errors without the model's weights and without taking memory.
  static void check(const Model& model, Policy& policy, const EngineOptions& options);

  // A free slot, or -1. `sequence` numbers what will be in it, for choices that are random: they follow it, so they do
  // not depend on the slot or on what else runs.
  int open(std::uint32_t sequence = 0);
  void close(int slot);
  // From the next step on the slot's steps belong to this question (LayerKv::question); 0 when it is opened.
  void ask(int slot, std::uint32_t question);

  // Both calls throw NonFiniteStep where logits, queries, cache entries or attention mass are NaN or infinite. The
  // slots can only be closed then.

  // The whole prompt of an opened slot, or its next part: end = the policy may compress now. logits [k, vocab]: of the
  // last k tokens. After out_of_memory the slot can only be closed.
  Fit prefill(int slot, std::span<const int> tokens, bool end, View<float, 2> logits);

  // One token per row.
  Fit step(const std::vector<std::int32_t>& slots, std::span<const int> tokens, const StepResult& out);

  SavedSequence save(int slot) const { return {store_->save(slot), given_[static_cast<std::size_t>(slot)]}; }
  Fit restore(int slot, const SavedSequence& saved);

  // For admission, in bytes of device frames: what a sequence of so many tokens holds when nothing of it is evicted (a
  // page of each KV head counts whole), what it holds at the end of such a prompt by what the policy says of itself,
  // and what the limit still leaves, on a GPU the memory that was free at the start.
  std::int64_t full_bytes(int tokens) const;
  std::int64_t prompt_bytes(int tokens) const;
  std::int64_t free_bytes() const;
  static constexpr std::int64_t no_limit = std::numeric_limits<std::int64_t>::max();

  void observe(EngineObserver* observer) { observer_ = observer; }  // null = nobody

  const Store& store() const { return *store_; }
  Ledger& ledger() { return store_->ledger(); }
  std::int64_t fired() const { return store_->fired(); }  // edits that changed something
  const Model& model() const { return executor_->model(); }
  std::int64_t replays() const { return executor_->replays(); }  // decode steps that were one launch of a graph
  double device_ms() const { return executor_->device_ms(); }    // of the latest decode step; NaN on the CPU

 private:
  bool replayable() const override { return capturable_ && options_.graphs && !observer_; }
  bool wants_prompt_mass() const override { return needs_.mass() == Mass::all; }
  bool wants_prompt_output() const override {
    return observer_ && observer_->reads_of_prompt() == EngineObserver::Prompt::everything;
  }
  bool wants_mass() const override { return needs_.mass() != Mass::none; }
  Fit before_prompt(int layer, int slot) override;
  Fit prompt(const PromptLayer& l) override;
  Selection select(const DecodeLayer& l, Fit& fit) override;
  Fit attended(const DecodeLayer& l) override;
  Fit finish_step(const std::vector<std::int32_t>& slots) override;

  LayerKv layer_kv(int layer, const std::vector<std::int32_t>& slots, std::span<const std::int32_t> position);
  LayerStep layer_step(const DecodeLayer& l);
  void keep_window(const PromptLayer& l);
  Fit apply(const std::vector<Edit>& edits, const std::vector<std::int32_t>& slots);
  // After a call of the executor: throws what its numbers show, the model's before the policy's. Returns fit.
  Fit settled(Fit fit, const std::vector<std::int32_t>& slots) const;

  std::shared_ptr<Policy> policy_;
  Needs needs_;
  bool capturable_ = false;  // by a graph: shapes of decode steps do not follow lengths then
  EngineOptions options_;
  OwnedStream owned_stream_;
  Stream stream_;  // of everything that runs here
  std::unique_ptr<Store> store_;
  std::unique_ptr<Executor> executor_;
  EngineObserver* observer_ = nullptr;
  HostCopy seen_;  // by the observer, on CUDA

  std::vector<std::int32_t> position_, step_;        // of the callback's rows
  std::vector<std::uint32_t> sequence_, sequences_;  // of the callback's rows; of each slot
  StreamMemory questions_;                           // [slot] u32
  std::vector<std::uint32_t> question_;              // [slot] the same on the host
  std::vector<std::vector<Given>> given_;            // [slot]
  std::vector<Edit> waiting_;                        // of this layer's select, due after its attention
  PagedKv pages_;                                    // what KvRows and StateColumn of the callback point to
  PageList attended_pages_;                          // what Selection points to
  TokenList attended_tokens_;
  struct Tail {
    StreamMemory queries;  // [rows, query head, head_dim] f32
    std::int64_t rows = 0;
  };
  std::vector<std::vector<Tail>> tail_;  // [slot][layer] last window queries of a chunked prompt
};

}  // namespace kvlab
