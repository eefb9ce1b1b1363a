// Runs a model's layers over the paged store, for prompts and for decode steps, and calls LayerHooks on the way. It
// knows nothing of policies. The views that hooks get point to memory of the device of the store's stream. Lists of
// slots are host memory.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/policy.hpp>

#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "exec/recorded_rows.hpp"
#include "model/model.hpp"
#include "ops/attend/attend.hpp"
#include "store/store.hpp"

namespace kvlab {

// The rows of one layer: a chunk's tokens, or one token of each slot. raw_* are the rows before RoPE. They are empty in
// the original regime, which rotates by text position.
struct LayerRows {
  int layer = 0;
  View<const float, 3> queries, raw_queries;    // [row, query head, head_dim]
  View<const float, 3> keys, raw_keys, values;  // [row, kv_head, head_dim]
  View<const float, 3> output;                  // [row, query head, head_dim] of attention, set after it has run
};

// The pages or tokens that attention of a decode step, or of a prompt's chunk, reads. Without a list it reads all
// resident tokens.
struct Selection {
  const PageList* pages = nullptr;
  const TokenList* tokens = nullptr;
  HeadLogits logits;          // what it leaves of its scores
  MadeUpTokens made_up;       // that it reads, too
  View<const float, 3> bias;  // of its logits; empty = none
  int most_distance = 0;      // as AttendArgs::most_distance
  LeftOut left_out;           // counts for what it does not read; empty = nothing does
};

// One layer of one prompt chunk of one sequence, after its attention.
struct PromptLayer : LayerRows {
  int slot = 0, past = 0;
  const PromptMask* masks = nullptr;  // [kv_head] of its attention, memory of the device; null = none
  bool last = false;                  // this chunk ends the prompt
  View<const float, 2> mass;          // [query head, past + token]; empty unless hooks want it, as `output` may be
  bool wants_lse = false;             // hooks want `lse`
  View<const float, 2> lse;           // [query head, token] as LayerPrefill::lse
};

// One layer of one decode step.
struct DecodeLayer : LayerRows {
  const std::vector<std::int32_t>* slots = nullptr;
  int room = 0;               // no head of the rows holds more tokens, in this step and at later launches of its graph
  View<const float, 3> mass;  // [row, query head, token], set after attention; empty unless hooks want it
  Selection read;             // the answer of select
};

class LayerHooks {
 public:
  virtual ~LayerHooks() = default;
  virtual bool wants_prompt_mass() const { return false; }
  virtual const PromptMask* prompt_masks(int /*layer*/) const { return nullptr; }  // as PromptLayer::masks
  virtual bool wants_prompt_lse() const { return false; }
  virtual bool wants_prompt_output() const { return true; }
  virtual bool wants_mass() const { return false; }  // the mass of decode steps
  // Token state that decode steps add their mass to. Then they give none.
  virtual ops::MassColumn mass_into() const { return {}; }
  // Called before a chunk's attention reads the slot's earlier tokens in the layer.
  virtual Fit before_prompt(int /*layer*/, int /*slot*/) { return Fit::ok; }
  virtual Fit prompt(const PromptLayer&) { return Fit::ok; }
  // Whether select_chunk says what chunks attend to. It is called before the chunk's attention, when the cache holds
  // its tokens. The answer, a list of pages of one row and a greatest distance, lives until the layer is done.
  virtual bool chooses_in_prompts() const { return false; }
  virtual Selection select_chunk(const PromptLayer&, Fit&) { return {}; }
  // Called before attention, after this step's tokens are appended. The answer lives until the layer is done. It may
  // have one list; two are Errc::internal.
  virtual Selection select(const DecodeLayer&, Fit&) { return {}; }
  virtual Fit attended(const DecodeLayer&) { return Fit::ok; }
  // Returns whether decode steps do without the host. Then the stream's work of one step serves all later steps of as
  // many rows, and an executor may leave the calls below out.
  virtual bool replayable() const { return false; }
  // Returns whether attended() leaves work that reads this layer's rows later: in another stream, or in finish_step.
  virtual bool keeps_rows() const { return false; }
  // Called after the last layer of a decode step, before the rows' counters advance. room: as DecodeLayer::room, of all
  // layers.
  virtual Fit finish_step(const std::vector<std::int32_t>& /*slots*/, int /*room*/) { return Fit::ok; }
};

// A decode step's results on the host. Either may be empty: copying the logits of a large vocabulary takes long.
struct StepResult {
  StepResult() = default;
  StepResult(View<float, 2> of_rows) : logits(of_rows) {}
  StepResult(std::span<std::int32_t> of_rows) : likeliest(of_rows) {}
  View<float, 2> logits;  // [row, vocab]
  // [row] token of the largest logit, the lowest of equal ones; -1 = the row is one of nonfinite_rows
  std::span<std::int32_t> likeliest;
};

class Executor {
 public:
  virtual ~Executor() = default;
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Runs one chunk of a prompt. logits [k, vocab], host memory on either device, receives those of the chunk's last k
  // tokens before the call returns; k may be 0.
  Fit prefill(int slot, std::span<const int> tokens, bool last, LayerHooks& hooks, View<float, 2> logits);

  // Runs one token for each row and advances the rows' counters.
  Fit decode(const std::vector<std::int32_t>& slots, std::span<const int> tokens, LayerHooks& hooks,
             const StepResult& out);

  // y [rows, hidden] = x [rows, head_dim] times a query head's part of the layer's output projection, without its bias.
  // Both are dense f32 memory of the device. Hooks may call it. A GPU rounds x to the weights' type.
  virtual void project_output(int layer, int head, const float* x, std::int64_t rows, float* y) const = 0;

  // out = the queries that the next layer would have for the input of this layer's attention (LayerStep::next_queries):
  // [row, query head, head_dim], dense f32 memory of the device. select() and attended() of `layer` may call it, in a
  // decode step of so many rows and in the original regime.
  virtual void queries_ahead(int layer, std::int64_t rows, float* out) = 0;

  // The rows of the latest call (a prompt is row 0) whose logits, queries, cache entries or attention mass were NaN or
  // infinite, ascending. Only the CPU checks mass: on a GPU its NaN comes with those of the output. A decode step whose
  // caller asks for no result is not checked.
  const std::vector<std::int32_t>& nonfinite_rows() const { return nonfinite_rows_; }

  const Model& model() const { return *model_; }
  // Before a decode step: the number of its variant (BeforeStep). Where whole steps have work that others have not, as
  // an eviction every n steps, an executor that replays steps has graphs of each variant.
  virtual void variant_of_step(int /*number*/) {}
  virtual std::int64_t replays() const { return 0; }  // decode steps that were one launch of a graph
  // Milliseconds of the latest decode step on a GPU from its first kernel to its last, gaps between kernels included.
  // NaN on the CPU.
  virtual double device_ms() const { return std::numeric_limits<double>::quiet_NaN(); }

 protected:
  Executor(std::shared_ptr<const Model> model, Store& store) : model_(std::move(model)), cache_(store) {}

  enum class Phase : std::uint8_t { prompt, prompt_shown, decode };  // shown: hooks look at a prompt's attention output

  // The device's parts of a call, in this order. `rows` is the number of a chunk's tokens, or of a decode step's slots.
  virtual void begin(std::span<const int> tokens, const std::vector<std::int32_t>& position, Phase phase) = 0;
  virtual void embed(std::int64_t rows) = 0;
  virtual void project(int layer, std::int64_t rows) = 0;  // queries, keys and values, before RoPE
  // For a chunk: runs RoPE, appends the tokens and attends over the cache, in the order that suits the device. Fills
  // `info` but for the layer, the slot and `last`.
  virtual Fit attend_prompt(PromptLayer& info, std::int64_t rows, int first, bool mass) = 0;
  // The same in two parts, without mass: what the chunk attends to is said between them.
  virtual Fit append_prompt(PromptLayer& info, std::int64_t rows, int first) = 0;
  virtual void attend_chosen(PromptLayer& info, std::int64_t rows, int first, const Selection& read) = 0;
  // For a decode step: append runs RoPE and appends the tokens, rows_of and step_mass return the views for hooks, and
  // attend returns its output.
  virtual Fit append(int layer, const std::vector<std::int32_t>& slots) = 0;
  virtual int room(int layer, const std::vector<std::int32_t>& slots) const { return cache_.max_length(layer, slots); }
  virtual LayerRows rows_of(int layer, std::int64_t rows) = 0;
  virtual View<float, 3> step_mass(std::int64_t rows, std::int64_t tokens) = 0;
  virtual View<const float, 3> attend(int layer, const std::vector<std::int32_t>& slots, const Selection& read,
                                      const View<float, 3>& mass, ops::MassColumn mass_into) = 0;
  // Called after attend, of the same layer: its output becomes that of ops::blend_left_out.
  virtual void fill_left_out(int layer, const std::vector<std::int32_t>& slots, const LeftOut& what) = 0;
  virtual void finish_layer(int layer, std::int64_t rows) = 0;                       // output projection and MLP
  virtual void prompt_logits(std::int64_t rows, const View<float, 2>& of_last) = 0;  // notes nonfinite_rows
  virtual void head(std::int64_t rows, const StepResult& out) = 0;                   // logits, on the device
  virtual void read(std::int64_t rows, const StepResult& out) = 0;  // copies them to the host; notes nonfinite_rows

  // Runs a decode step between begin() and the advance of the counters: all layers, or one launch of their graph.
  virtual Fit run(const std::vector<std::int32_t>& slots, LayerHooks& hooks, const StepResult& out) {
    return run_layers(slots, hooks, out);
  }
  Fit run_layers(const std::vector<std::int32_t>& slots, LayerHooks& hooks, const StepResult& out);

  std::shared_ptr<const Model> model_;
  std::vector<std::int32_t> nonfinite_rows_;

 private:
  Store& cache_;
};

// Returns the most bytes of attention mass that an executor on either device keeps at once.
std::int64_t mass_bytes(const Shape& s, Mass wanted);
// The same of mass that waits for a step's end on a GPU (ops::MassColumn::may_wait).
std::int64_t late_mass_bytes(const Shape& s);

// Throws the errors that make_executor would throw on such a device, except those for the model's weights.
void check_executor(const Model& model, Device device);

// Makes an executor on the device of the store's stream. The store must outlive it. Throws Errc::unsupported if that
// device cannot run the model. batch_invariant: a decode step gives every row the same bits whatever other rows there
// are. Without it a GPU cuts sums by the batch, which takes less time. oneDNN's bf16 products on the CPU always do so.
std::unique_ptr<Executor> make_executor(std::shared_ptr<const Model> model, Store& store, bool batch_invariant = false);

// One that replays a recording, on the CPU. The model may be an outline. Borrows the rows, which must fit the store.
std::unique_ptr<Executor> make_replay_executor(std::shared_ptr<const Model> model, Store& store,
                                               const RecordedRows& rows);

}  // namespace kvlab
