// Runs a model's layers over the paged store, for prompts and for decode steps, and tells a LayerHooks what happens on
// the way. It knows nothing of policies.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/policy.hpp>

#include <span>
#include <vector>

#include "model/model.hpp"
#include "store/store.hpp"

namespace kvlab {

// One layer of one prompt chunk of one sequence, after its attention. raw_*: before RoPE; empty in the original regime,
// where queries and keys are rotated by text position already.
struct PromptLayer {
  int layer = 0, slot = 0, past = 0;
  bool last = false;                            // this chunk ends the prompt
  View<const float, 3> queries, raw_queries;    // [token, query head, head_dim]
  View<const float, 3> keys, raw_keys, values;  // [token, kv_head, head_dim]
  View<const float, 3> output;                  // [token, query head, head_dim]
  View<const float, 2> mass;                    // [query head, past + token]; empty unless asked for
};

// One layer of one decode step.
struct DecodeLayer {
  int layer = 0;
  const std::vector<std::int32_t>* slots = nullptr;
  View<const float, 3> queries, raw_queries;    // [row, query head, head_dim]
  View<const float, 3> keys, raw_keys, values;  // [row, kv_head, head_dim]
  View<const float, 3> output;                  // after attention only
  View<const float, 3> mass;                    // [row, query head, token]; after attention, empty unless asked for
  const PageList* pages = nullptr;              // what attention read; null = everything
};

class LayerHooks {
 public:
  virtual ~LayerHooks() = default;
  virtual bool wants_prompt_mass() const { return false; }
  virtual bool wants_mass() const { return false; }  // of decode steps
  // Before a chunk's attention reads what the layer holds of the slot already.
  virtual Fit before_prompt(int /*layer*/, int /*slot*/) { return Fit::ok; }
  virtual Fit prompt(const PromptLayer&) { return Fit::ok; }
  // Before attention, this step's tokens appended. null = everything resident. The list lives until the layer is done.
  virtual const PageList* select(const DecodeLayer&, Fit&) { return nullptr; }
  virtual Fit attended(const DecodeLayer&) { return Fit::ok; }
  // After the last layer of a decode step, before the rows' counters advance.
  virtual Fit finish_step(const std::vector<std::int32_t>& /*slots*/) { return Fit::ok; }
};

class Executor {
 public:
  Executor(std::shared_ptr<const Model> model, Store& store);

  // One chunk of a prompt. logits [k, vocab] receives those of the chunk's last k tokens; k may be 0.
  Fit prefill(int slot, std::span<const int> tokens, bool last, LayerHooks& hooks, View<float, 2> logits);

  // One token for each row; logits [row, vocab]. The rows' counters advance.
  Fit decode(const std::vector<std::int32_t>& slots, std::span<const int> tokens, LayerHooks& hooks,
             View<float, 2> logits);

  const Model& model() const { return *model_; }

 private:
  struct Qkv {
    std::vector<float> q, k, v, raw_q, raw_k;
    void resize(std::size_t rows, const ModelConfig& c, bool raw);
  };
  void project(const ModelLayer& l, const float* x, std::int64_t rows, std::int64_t at);
  void finish_layer(const ModelLayer& l, const float* attention, float* x, std::int64_t rows);
  void add_angle(int position);
  void rotate_token(int layer, int slot, std::int64_t row, std::int64_t ahead);
  void logits_of(const float* x, std::int64_t rows, View<float, 2> out);

  std::shared_ptr<const Model> model_;
  Store& store_;
  Qkv qkv_;
  std::vector<float> x_, hidden_, wide_, attention_, mass_;
  std::vector<float> angles_;  // original regime: [row, 2, head_dim / 2] cos and sin
};

}  // namespace kvlab
