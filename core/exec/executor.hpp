// Runs a model's layers over the paged store, for prompts and for decode steps, and tells a LayerHooks what happens on
// the way. It knows nothing of policies. The views that hooks get point to memory of the store's stream's device; lists
// of slots are host memory.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/policy.hpp>

#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "model/model.hpp"
#include "store/store.hpp"

namespace kvlab {

// The rows of one layer: a chunk's tokens, or one token of each slot. raw_*: before RoPE; empty in the original regime,
// where queries and keys are rotated by text position already.
struct LayerRows {
  int layer = 0;
  View<const float, 3> queries, raw_queries;    // [row, query head, head_dim]
  View<const float, 3> keys, raw_keys, values;  // [row, kv_head, head_dim]
  View<const float, 3> output;                  // [row, query head, head_dim] of attention, once it has run
};

// One layer of one prompt chunk of one sequence, after its attention.
struct PromptLayer : LayerRows {
  int slot = 0, past = 0;
  bool last = false;          // this chunk ends the prompt
  View<const float, 2> mass;  // [query head, past + token]; empty unless asked for, as `output` may be
};

// What attention of a decode step reads: pages, tokens or, without a list, everything resident.
struct Selection {
  const PageList* pages = nullptr;
  const TokenList* tokens = nullptr;
};

// One layer of one decode step.
struct DecodeLayer : LayerRows {
  const std::vector<std::int32_t>* slots = nullptr;
  View<const float, 3> mass;  // [row, query head, token]; after attention, empty unless asked for
  Selection read;             // by attention; set once select has answered
};

class LayerHooks {
 public:
  virtual ~LayerHooks() = default;
  virtual bool wants_prompt_mass() const { return false; }
  virtual bool wants_prompt_output() const { return true; }
  virtual bool wants_mass() const { return false; }  // of decode steps
  // Before a chunk's attention reads what the layer holds of the slot already.
  virtual Fit before_prompt(int /*layer*/, int /*slot*/) { return Fit::ok; }
  virtual Fit prompt(const PromptLayer&) { return Fit::ok; }
  // Before attention, this step's tokens appended. The list lives until the layer is done; two are Errc::internal.
  virtual Selection select(const DecodeLayer&, Fit&) { return {}; }
  virtual Fit attended(const DecodeLayer&) { return Fit::ok; }
  // Do decode steps need the host no more? What the calls below give to the stream in one step then stands for every
  // later one of as many rows, and an executor may leave the calls out.
  virtual bool replayable() const { return false; }
  // After the last layer of a decode step, before the rows' counters advance.
  virtual Fit finish_step(const std::vector<std::int32_t>& /*slots*/) { return Fit::ok; }
};

// What a decode step leaves on the host. Either may be empty: logits of a large vocabulary take long to come from a
// GPU.
struct StepResult {
  StepResult() = default;
  StepResult(View<float, 2> of_rows) : logits(of_rows) {}
  StepResult(std::span<std::int32_t> of_rows) : likeliest(of_rows) {}
  View<float, 2> logits;  // [row, vocab]
  // [row] the token of the largest logit, the lowest of equal ones; -1 = the row is one of nonfinite_rows
  std::span<std::int32_t> likeliest;
};

class Executor {
 public:
  virtual ~Executor() = default;
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // One chunk of a prompt. logits [k, vocab] receives those of the chunk's last k tokens; k may be 0. Logits are host
  // memory on either device and there when the call returns.
  Fit prefill(int slot, std::span<const int> tokens, bool last, LayerHooks& hooks, View<float, 2> logits);

  // One token for each row. The rows' counters advance.
  Fit decode(const std::vector<std::int32_t>& slots, std::span<const int> tokens, LayerHooks& hooks,
             const StepResult& out);

  // The rows of the latest call (a prompt is row 0) of which logits, queries, cache entries or attention mass were NaN
  // or infinite, ascending. Mass is looked at on the CPU alone: on a GPU its NaN comes with those of the output. A
  // decode step of which nothing is asked is not looked at.
  const std::vector<std::int32_t>& nonfinite_rows() const { return nonfinite_rows_; }

  const Model& model() const { return *model_; }
  virtual std::int64_t replays() const { return 0; }  // decode steps that were one launch of a graph
  // Of the latest decode step: from its first kernel to its last one on a GPU, what lies between the kernels of an
  // eager step included. NaN on the CPU.
  virtual double device_ms() const { return std::numeric_limits<double>::quiet_NaN(); }

 protected:
  Executor(std::shared_ptr<const Model> model, Store& store) : model_(std::move(model)), cache_(store) {}

  enum class Phase : std::uint8_t { prompt, prompt_shown, decode };  // shown: hooks look at a prompt's attention output

  // A device's part of a call, in this order. `rows` are the call's: a chunk's tokens, or the slots of a decode step.
  virtual void begin(std::span<const int> tokens, const std::vector<std::int32_t>& position, Phase phase) = 0;
  virtual void embed(std::int64_t rows) = 0;
  virtual void project(int layer, std::int64_t rows) = 0;  // queries, keys and values, before RoPE
  // Of a chunk: RoPE, the cache's new tokens and attention over all of them, in the order that suits the device. Fills
  // all of `info` but the layer, the slot and `last`.
  virtual Fit attend_prompt(PromptLayer& info, std::int64_t rows, int first, bool mass) = 0;
  // Of a decode step: RoPE and the cache's new tokens; what hooks see of them; attention, which returns its output.
  virtual Fit append(int layer, const std::vector<std::int32_t>& slots) = 0;
  virtual LayerRows rows_of(int layer, std::int64_t rows) = 0;
  virtual View<float, 3> step_mass(std::int64_t rows, std::int64_t tokens) = 0;
  virtual View<const float, 3> attend(int layer, const std::vector<std::int32_t>& slots, const Selection& read,
                                      const View<float, 3>& mass) = 0;
  virtual void finish_layer(int layer, std::int64_t rows) = 0;                       // output projection and MLP
  virtual void prompt_logits(std::int64_t rows, const View<float, 2>& of_last) = 0;  // notes nonfinite_rows
  virtual void head(std::int64_t rows, const StepResult& out) = 0;                   // logits, on the device
  virtual void read(std::int64_t rows, const StepResult& out) = 0;  // brings them to the host; notes nonfinite_rows

  // A decode step between begin() and the advance of the counters: all layers, or one launch that stands for them.
  virtual Fit run(const std::vector<std::int32_t>& slots, LayerHooks& hooks, const StepResult& out) {
    return run_layers(slots, hooks, out);
  }
  Fit run_layers(const std::vector<std::int32_t>& slots, LayerHooks& hooks, const StepResult& out);

  std::shared_ptr<const Model> model_;
  std::vector<std::int32_t> nonfinite_rows_;

 private:
  Store& cache_;
};

// What make_executor would refuse on such a device, of the model all but its weights.
void check_executor(const Model& model, Device device);

// Runs on the device of the store's stream; the store outlives it. Errc::unsupported where that device cannot run the
// model. batch_invariant: a decode step gives every row the same bits whatever other rows there are; on a GPU sums are
// cut differently for another batch otherwise, and cost less time. On the CPU, oneDNN's bf16 products do the same.
std::unique_ptr<Executor> make_executor(std::shared_ptr<const Model> model, Store& store, bool batch_invariant = false);

}  // namespace kvlab
