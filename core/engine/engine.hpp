// The engine runs a model, a store and a policy together. Sequences live in slots. It prefills prompts, and a decode
// step feeds one token to each row; rows may have different lengths.
#pragma once
#include <kvlab/policy.hpp>

#include <array>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/finite.hpp"
#include "base/part_timer.hpp"
#include "base/stream_memory.hpp"
#include "engine/cache_memory.hpp"
#include "engine/foresight.hpp"
#include "engine/host_copy.hpp"
#include "engine/projection.hpp"
#include "engine/queries_ahead.hpp"
#include "exec/executor.hpp"

namespace kvlab {

struct EngineOptions {
  Device device = Device::cpu;
  int slots = 1;
  int max_tokens = 0;  // per sequence, prompt and output
  int page_size = 16;
  int prefill_chunk = 0;  // prompt tokens per chunk; 0 = the whole prompt, layer by layer
  BudgetAmount budget;
  std::int64_t device_limit = -1, host_limit = -1;  // bytes of pages; -1 = none
  std::int64_t scratch_limit = -1;                  // bytes of a callback's scratch; -1 = none
  Spill spill = Spill::always;
  bool copy_by_host = false;               // StoreOptions::copy_by_host; no graph holds the steps then
  bool batch_invariant = false;            // see make_executor
  bool graphs = true;                      // on a GPU decode steps may run as graphs
  const RecordedMass* recorded = nullptr;  // for a policy that needs future mass; borrowed
  // Of a recording, in place of the model's, which may be an outline; borrowed. One slot, whole prompts, no logits.
  const RecordedRows* rows = nullptr;
  int reload_steps = 0;       // StoreOptions::reload_steps, for tests
  int layers_beside = 8;      // whose observe shares launches beside the step; tests take fewer
  bool protect_host = false;  // tests: the host tier is unreadable while attention runs
};

// Measures what passes through the engine. Arguments are borrowed for the call. They are host memory, but where
// Prompt::in_place or steps_in_place say otherwise. An observer asks the store for its shape and positions, which are
// exact on either device, and for no views.
class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  // The parts of a prompt's layer that the observer reads. A GPU need not copy the others. in_place: keys and values as
  // they are, memory of the store's device; the observer reads them in the order of its stream.
  enum class Prompt : std::uint8_t { nothing, in_place, keys_and_values, everything };
  virtual Prompt reads_of_prompt() const { return Prompt::everything; }
  // Whether a step's layer comes as it is, memory of the store's device, and not as a copy.
  virtual bool steps_in_place() const { return false; }
  virtual void prompt(const PromptLayer&, const Store&) {}
  virtual void attended(const DecodeLayer&, const Store&) {}  // before the policy's own observe and its edits
};

// An entry of a slot's history since it opened: the tokens of one prefill call, or of decode steps in a row.
struct Given {
  std::vector<int> tokens;
  bool prompt = false, end = false;  // end: the prompt ended here
};

// A sequence that another slot can continue.
struct SavedSequence {
  std::vector<std::byte> cache;
  std::vector<Given> given;
};

// One that waits in host memory until a slot of the same engine continues it.
struct AsideSequence {
  Store::Aside cache;
  std::vector<Given> given;
  std::int64_t bytes(Tier tier) const { return cache->page_bytes(tier); }  // of its pages in a slot
};

// Reports a call whose numbers were not finite, with the tokens that replay it (run/nonfinite.hpp).
class NonFiniteStep final : public NonFinite {
 public:
  struct Row {
    std::uint32_t sequence = 0, question = 0;
    std::vector<Given> given;
  };
  // rows: the rows with such numbers, at least one.
  explicit NonFiniteStep(std::vector<Row> rows);
  const std::vector<Row>& rows() const noexcept { return rows_; }

 private:
  std::vector<Row> rows_;
};

class Engine final : private LayerHooks {
 public:
  // Throws Errc::config or Errc::unsupported for needs that this engine cannot meet.
  Engine(std::shared_ptr<const Model> model, std::shared_ptr<Policy> policy, const EngineOptions& options);

  // Throws the same errors. It needs no weights and makes no cache.
  static void check(const Model& model, Policy& policy, const EngineOptions& options);

  // The memory on the device that an engine with these options takes for its cache. It bounds neither activations nor
  // the memory that kernels keep between calls. Attaches the policy, which serves no engine afterwards.
  static CacheMemory memory(const Model& model, Policy& policy, const EngineOptions& options);
  // Sets the limits of pages and scratch so that this memory fits `bytes`. Throws NoRoom that names the parts.
  static void fit(EngineOptions& options, std::int64_t bytes, const Model& model, Policy& policy);

  // Opens a free slot and returns it, or -1. Random choices follow the number `sequence`, so they depend neither on the
  // slot nor on other sequences.
  int open(std::uint32_t sequence = 0);
  void close(int slot);
  // The slot's next steps belong to this question (LayerKv::question). A slot opens with question 0.
  void ask(int slot, std::uint32_t question);

  // prefill and step throw NonFiniteStep where logits, queries, cache entries or attention mass are NaN or infinite.
  // The caller can then only close the slots.

  // Prefills the whole prompt of an opened slot, or its next part. end: the prompt ends here, and the policy may
  // compress. logits [k, vocab] receives those of the last k tokens. After out_of_memory the slot can only be closed.
  Fit prefill(int slot, std::span<const int> tokens, bool end, View<float, 2> logits);

  // Runs a decode step with one token per row.
  Fit step(const std::vector<std::int32_t>& slots, std::span<const int> tokens, const StepResult& out);

  SavedSequence save(int slot) const { return {store_->save(slot), given_[static_cast<std::size_t>(slot)]}; }
  Fit restore(int slot, const SavedSequence& saved);
  // Takes a sequence out of its slot, which it closes. The ledger counts its pages as held by the host. nullopt: the
  // host has no memory for them, and the slot stays as it is. bring_back continues it in an open slot.
  std::optional<AsideSequence> set_aside(int slot);
  Fit bring_back(int slot, const AsideSequence& sequence);
  void drop(const AsideSequence& sequence);  // it will not be brought back

  // For admission, in bytes of device frames. full_bytes: a sequence of so many tokens without eviction, in whole pages
  // of each KV head. free_bytes: the part of Store::page_limit() that no page takes yet, or one that leaves when frames
  // run short.
  std::int64_t full_bytes(int tokens) const { return full_bytes(tokens, store_->options().codecs[0]); }
  std::int64_t free_bytes() const;
  // In bytes of host frames: what sequences to come may take, what is taken, and what a sequence with spare pages will
  // take when it spills. fills_host: prompts take host frames whether frames of the device run short or not.
  // step_bytes: what a row's step may take of the device by appends and place edits.
  std::int64_t host_room_bytes() const;
  std::int64_t host_used_bytes() const { return store_->page_bytes(Tier::host); }
  std::int64_t host_needed_bytes(int slot) const;
  // Whether prompts end before the policy may compress any layer of them.
  bool compresses_at_end() const { return needs_.finish_prompt(); }
  // Most tokens of a prompt's chunk, where the policy chooses what each chunk attends to; else 0.
  int prompt_chunk() const { return prompt_chunk_; }
  bool fills_host() const {
    return needs_.archive() || (needs_.host_pages() && store_->options().spill == Spill::always);
  }
  std::int64_t step_bytes() const { return full_bytes(1) * (needs_.host_pages() ? 2 : 1); }
  std::int64_t used_bytes() const { return store_->page_bytes(Tier::device); }
  // Whether another step of these slots fits, by the pages that appends and place edits may take. The device is asked
  // only where its memory may be short. Unless growth_known(), other edits may take more.
  bool room_for_step(const std::vector<std::int32_t>& slots) const { return store_->room_for_step(slots); }
  bool growth_known() const { return capturable_; }
  // Whether pages that the sequence waits for are under way (Deadline::sequence). A step of it waits for them.
  bool reloading(int slot) { return store_->reloading(slot); }
  static constexpr std::int64_t no_limit = std::numeric_limits<std::int64_t>::max();
  // Most bytes of a sequence's frames by Policy::demand: of the device after its prompt, of the device after decode
  // steps, and of the host. -1 = the policy does not say; what it does not say of the prompt is the whole prompt.
  struct Demanded {
    std::int64_t prompt = -1, decode = -1, host = -1;
  };
  Demanded demanded(int prompt_tokens, int max_new) const;

  void observe(EngineObserver* observer) { observer_ = observer; }  // null = nobody

  const Store& store() const { return *store_; }
  Ledger& ledger() { return store_->ledger(); }
  std::int64_t fired() const { return store_->fired(); }  // edits that changed something
  const Model& model() const { return executor_->model(); }
  std::int64_t replays() const { return executor_->replays(); }  // decode steps that were one launch of a graph
  double device_ms() const { return executor_->device_ms(); }    // of the latest decode step; NaN on the CPU

 private:
  void count_aside(const AsideSequence& sequence, int sign);  // in the ledger and aside_bytes_
  bool replayable() const override { return capturable_ && options_.graphs && !options_.copy_by_host && !observer_; }
  // Queries of other regimes lie in a buffer that the next layer takes.
  bool keeps_rows() const override { return needs_.observe_beside() && needs_.rope() == RopeRegime::original; }
  bool wants_prompt_lse() const override { return needs_.prompt_lse(); }
  bool wants_prompt_mass() const override { return needs_.any_mass() == Mass::all; }
  const PromptMask* prompt_masks(int layer) const override {
    return masks_.empty() ? nullptr : masks_[static_cast<std::size_t>(layer)];
  }
  void ask_masks();
  bool wants_prompt_output() const override {
    return observer_ && observer_->reads_of_prompt() == EngineObserver::Prompt::everything;
  }
  bool wants_mass() const override { return needs_.mass() != Mass::none; }
  ops::MassColumn mass_into() const override { return mass_into_; }
  bool chooses_in_prompts() const override { return prompt_chunk_ > 0; }
  Selection select_chunk(const PromptLayer& l, Fit& fit) override;
  Fit before_prompt(int layer, int slot) override;
  Fit prompt(const PromptLayer& l) override;
  Selection select(const DecodeLayer& l, Fit& fit) override;
  Fit attended(const DecodeLayer& l) override;
  Fit finish_step(const std::vector<std::int32_t>& slots, int room) override;

  // Host memory of a prompt's callback.
  struct PromptRow {
    std::vector<std::int32_t> slots;
    std::int32_t step[1] = {0};
    bool last[1];
    explicit PromptRow(const PromptLayer& l) : slots(1, l.slot), last{l.last} {}
  };
  LayerPrefill layer_prefill(const PromptLayer& l, std::span<const std::int32_t> position, const PromptRow& row);
  LayerKv layer_kv(int layer, const std::vector<std::int32_t>& slots, std::span<const std::int32_t> position);
  std::int64_t frame_bytes(CodecSpec codec) const;
  std::int64_t full_bytes(std::int64_t tokens, CodecSpec codec) const;
  void count_budgets(std::span<const std::int32_t> position);  // once per step, or per layer of a prompt
  Fit finish_prompt(const std::vector<std::int32_t>& slots, std::span<const std::int32_t> position);
  LayerStep layer_step(const DecodeLayer& l);
  Fit observe(const DecodeLayer& l);
  bool places(const std::vector<std::int32_t>& slots) const;
  Fit observe_late(bool beside);  // of late_layers_
  static void check_late(const Edits& edits);
  void keep_window(const PromptLayer& l);
  void give_text(int slot, std::int64_t position, std::span<const int> tokens);  // to LayerKv::text
  void give_text(int slot, const std::vector<Given>& given);
  // Of a callback that is not select().
  // last: as of Store::apply.
  Fit apply_after(const char* callback, const std::vector<Edit>& edits, const std::vector<std::int32_t>& slots,
                  bool last = false);
  Fit apply(const std::vector<Edit>& edits, const std::vector<std::int32_t>& slots, bool last = false);
  // Ends a call of the executor. Throws NonFiniteStep for the model's numbers, then the error of Verified::verify() for
  // the policy's. Returns fit.
  Fit settled(Fit fit, const std::vector<std::int32_t>& slots) const;

  std::shared_ptr<Policy> policy_;
  Needs needs_;
  ops::MassColumn mass_into_;
  std::vector<const PromptMask*> masks_;  // [layer] as PromptLayer::masks; empty = no layer has one
  int prompt_chunk_ = 0;                  // ChoosesInPrompts::prompt_chunk
  bool capturable_ = false;  // a graph may capture the policy: shapes of decode steps follow the room of the graph then
  EngineOptions options_;
  OwnedStream owned_stream_;
  Stream stream_;  // all work of the engine runs on it
  std::unique_ptr<Store> store_;
  std::unique_ptr<Executor> executor_;
  EngineObserver* observer_ = nullptr;
  HostCopy seen_;  // copies for the observer, on CUDA

  std::vector<std::int32_t> position_, step_;        // of the callback's rows
  std::vector<std::int32_t> budget_, unlimited_;     // of the same rows: LayerKv::budget_tokens, and of dense layers
  BudgetAmount for_pages_;                           // the budget less the policy's state
  std::int64_t aside_bytes_ = 0;                     // that set_aside holds on the host
  std::int64_t page_bytes_ = 0;                      // device bytes of one page of a KV head
  std::vector<std::uint32_t> sequence_, sequences_;  // of the callback's rows; of each slot
  StreamMemory questions_;                           // [slot] u32
  std::vector<std::uint32_t> question_;              // [slot] the same on the host
  std::optional<Foresight> foresight_;               // where the policy needs it, like projection_
  std::optional<Projection> projection_;
  std::optional<NextQueries> ahead_;
  StreamMemory device_steps_;              // [slot] i32: LayerKv::steps
  std::vector<std::int32_t> host_steps_;   // [slot] the same on the host
  StreamMemory text_, token_kinds_;        // of LayerKv::text, where the policy needs it
  std::vector<std::vector<Given>> given_;  // [slot]
  std::vector<DecodeLayer> late_layers_;   // whose observe is still to come
  std::vector<Edit> waiting_;              // edits of this layer's select that are due after its attention
  PagedKv pages_;                          // KvRows and StateColumn of the callback point to it
  PageList attended_pages_;                // Selection points to one of these lists
  TokenList attended_tokens_;
  struct Tail {
    StreamMemory queries;  // [rows, query head, head_dim] f32
    std::int64_t rows = 0;
  };
  std::vector<std::vector<Tail>> tail_;  // [slot][layer] last window queries of a chunked prompt
};

}  // namespace kvlab
