// The executor on CUDA: weights and cache in bf16 or f16, activations between products in f32.
// A prompt's attention runs in ops::attend_prompt. Where that cannot, it runs in the op of decode steps: each token is
// a row that sees no token after itself. With a codec or cache-relative RoPE it reads a copy of the layer
// (ops::prompt_pages).
// Where hooks are replayable, the second decode step of a number of rows becomes a graph, which later steps launch.
// Tokens, text positions and slots lie in device memory, and the store's kernels take frames without the host.
#pragma once
#include <map>
#include <memory>
#include <tuple>

#include "base/cuda_graph.hpp"
#include "base/cuda_stopwatch.hpp"
#include "base/late_state.hpp"
#include "base/part_events.hpp"
#include "base/stream_memory.hpp"
#include "exec/executor.hpp"
#include "model/cuda_model.hpp"
#include "ops/attend/late_mass.hpp"
#include "ops/linear/linear.hpp"
#include "store/cuda_store.hpp"

namespace kvlab {

class CudaExecutor final : public Executor, private LateState {
 public:
  // Throws Errc::unsupported for a model without weights on the device.
  CudaExecutor(std::shared_ptr<const Model> model, CudaStore& store, bool batch_invariant = false);
  static void check(const Model& model);  // throws the same for all but the weights

  void project_output(int layer, int head, const float* x, std::int64_t rows, float* y) const override;
  void queries_ahead(int layer, std::int64_t rows, float* out) override;
  std::int64_t replays() const override { return replayed_; }
  double device_ms() const override { return watch_.ms(); }
  void variant_of_step(int number) override { variant_ = number; }

 protected:
  void begin(std::span<const int> tokens, const std::vector<std::int32_t>& position, Phase phase) override;
  void embed(std::int64_t rows) override;
  void project(int layer, std::int64_t rows) override;
  Fit attend_prompt(PromptLayer& info, std::int64_t rows, int first, bool mass) override;
  Fit append_prompt(PromptLayer& info, std::int64_t rows, int first) override;
  void attend_chosen(PromptLayer& info, std::int64_t rows, int first, const Selection& read) override;
  Fit append(int layer, const std::vector<std::int32_t>& slots) override;
  int room(int layer, const std::vector<std::int32_t>& slots) const override;
  LayerRows rows_of(int layer, std::int64_t rows) override;
  View<float, 3> step_mass(std::int64_t rows, std::int64_t tokens) override;
  View<const float, 3> attend(int layer, const std::vector<std::int32_t>& slots, const Selection& read,
                              const View<float, 3>& mass, ops::MassColumn mass_into) override;
  void fill_left_out(int layer, const std::vector<std::int32_t>& slots, const LeftOut& what) override;
  void finish_layer(int layer, std::int64_t rows) override;
  void prompt_logits(std::int64_t rows, const View<float, 2>& of_last) override;
  void head(std::int64_t rows, const StepResult& out) override;
  void read(std::int64_t rows, const StepResult& out) override;
  Fit run(const std::vector<std::int32_t>& slots, LayerHooks& hooks, const StepResult& out) override;

 private:
  // Counts of buffer moves. A graph is stale when they differ from those at its capture.
  struct State {
    std::int64_t moves = -1, grown = -1, scratch = -1;
    bool tails_below = false;  // before_step has work
    bool parts = false;        // someone asks for the times of a step's parts
    bool operator==(const State&) const = default;
  };
  struct Replay {
    State warm, captured;              // after the latest step without a graph; at the capture of `graph`
    int room = 0;                      // tokens of a head that the arrays of `graph` have room for
    CudaStore::Taken taken;            // by edits of the step
    std::shared_ptr<PartMarks> marks;  // that `graph` holds; null = none
    CudaGraph graph;
  };

  template <class T>
  T* room(StreamMemory& m, std::int64_t count);
  void write_late() override;  // adds the mass of late_
  // Makes room for the mass of the next layer, if it may wait for the step's end. Returns null if it may not.
  ops::LateMass* wait_with_mass(std::int64_t rows, const View<float, 3>& mass, const ops::MassColumn& into);
  State state() const;
  void note_prompt(const View<float, 2>& logits);  // for nonfinite_rows, after the last layer
  Replay& replay_of(const std::vector<std::int32_t>& slots) {
    return replays_[{slots.size(), store_.any_spills(slots), variant_}];
  }
  bool replay(const std::vector<std::int32_t>& slots, LayerHooks& hooks, const StepResult& out);
  void make_room(Replay& r, const std::vector<std::int32_t>& slots) const;
  ops::LinearArgs product(const CudaMatrix& w, const void* x, DType x_dtype, std::int64_t rows,
                          const StreamMemory& bias, float* y, std::int64_t y_stride) const;
  bool fuses_norms(std::int64_t rows) const;
  void add_to_x(ops::LinearArgs a, std::int64_t at, const StreamMemory& norm, bool leave);
  const void* normed(std::int64_t at, std::int64_t rows, const StreamMemory& weight, bool left, ops::NormTaken& taken);
  void norm(const float* x, const StreamMemory& weight, std::int64_t rows, void* out);
  ops::RopeAppendArgs rope(int layer, std::int64_t rows);
  Fit append_chunk(int layer, int slot, std::int64_t tokens, int first, void* rounded);
  // Turns queries and keys of the view's rows to their ranks, in turned_. Their tokens are the view's last, or with
  // `ahead` come after it. Where `slots` is null, all rows are of one slot.
  void turn(const PagedKv& kv, bool ahead);
  PagedKv chunk_view(int layer, int slot, std::int64_t tokens);
  void attend_rows(const PagedKv& kv, std::int64_t first_row, const Selection& read, View<float, 3> mass,
                   ops::MassColumn mass_into, const PromptMask* masks = nullptr, bool leaves_lse = false,
                   ops::LateMass* late = nullptr);
  bool rounds(const PagedKv& kv) const;
  bool rounds_queries(std::int64_t tokens) const;
  void* rounded_queries(std::int64_t tokens);
  static std::int64_t attention_rows(std::int64_t tokens);
  // Returns the type of the output in attention_.
  DType attend_chunk(const PagedKv& chunk, const PromptLayer& info, int first, int longest, View<float, 2> sums,
                     View<const float, 2>* lse);
  void logits_of_rows(std::int64_t first_row, std::int64_t rows);
  void logits_of(std::int64_t rows, View<float, 2> out);  // copies the result of logits_of_rows to the host
  View<const float, 3> part(std::int64_t rows, std::int64_t first_head, std::int64_t heads) const;    // heads of qkv_
  View<const float, 3> turned(std::int64_t rows, std::int64_t first_head, std::int64_t heads) const;  // after RoPE
  std::int64_t rows_together() const;
  void attend_each(const PagedKv& kv, const Selection& read, const View<float, 3>& mass, ops::MassColumn mass_into);
  bool decoding() const { return phase_ == Phase::decode; }
  bool relative() const { return store_.options().rope == RopeRegime::cache_relative; }
  bool re_rotated() const { return store_.options().rope == RopeRegime::re_rotate; }
  bool by_rank() const { return store_.options().rope != RopeRegime::original; }  // RoPE uses ranks, not text positions

  std::int64_t turned_width() const {
    const ModelConfig& c = model_->config;
    return relative() ? std::int64_t{c.heads + c.kv_heads} * c.head_dim : qkv_width();
  }
  std::int64_t qkv_width() const {
    const ModelConfig& c = model_->config;
    return std::int64_t{c.heads + 2 * c.kv_heads} * c.head_dim;
  }

  CudaStore& store_;
  bool batch_invariant_;
  Phase phase_ = Phase::prompt;
  int room_ = 0;                            // of a step that a graph may hold; 0 = this step's own lengths
  void* rounded_queries_ = nullptr;         // the chunk's rounded queries for cuDNN; null = none
  const StreamMemory* attended_ = nullptr;  // the buffer of attention's output that the output projection reads
  DType attended_type_ = DType::f32;        // its type
  const CudaModel& weights_;
  Stream stream_;
  StreamMemory cosine_, sine_;      // f32 [max_tokens, head_dim / 2]
  StreamMemory tokens_, position_;  // i32 [row]
  // qkv_: of a decode step whose hooks keep rows, one after the other for all layers.
  float* qkv() const { return qkv_.as<float>() + qkv_at_; }
  std::int64_t qkv_at_ = 0;
  bool keeps_rows_ = false;
  StreamMemory x_, qkv_, attention_;  // f32 [row, hidden], [row, heads + 2 kv_heads, head_dim], [row, heads, head_dim];
                                      // attention_ of a prompt may have the weights' dtype if no hook reads it, and
                                      // rounded queries may follow it
  StreamMemory rounded_;              // attention's output of a decode step in the weights' dtype
  StreamMemory turned_;               // f32 [row, heads + kv_heads, head_dim] if by_rank(); re_rotate: as qkv_
  StreamMemory normed_, gated_;       // [row, hidden], [row, ffn] in the weights' dtype
  StreamMemory squares_;              // f32 [row, hidden / norm_piece]: sums of squares for norms left in normed_
  StreamMemory length_, rows_;        // i32 [token, kv_head], [token]: lengths and slots of CudaStore::causal_view
  StreamMemory likeliest_;            // i32 [row]
  StreamMemory nonfinite_;            // i32 [row]: marks of rows, 0 between calls; a prompt uses the first
  StreamMemory mass_, sums_, logits_;  // f32
  StreamMemory late_room_;             // of late_, of all layers
  std::vector<ops::LateMass> late_;    // mass of this step's layers that is not in token state yet
  StreamMemory lse_;  // f32 [row, query head] of attention that made-up tokens join, or of a chunk with a list
  StreamMemory copy_, copy_table_;  // pages and table of one layer's copy, for prompts
  PageLayout copy_layout_;
  std::int64_t grown_ = 0;  // times that room() moved one of these buffers
  // By the number of rows, whether one of them spills, and the variant of the step.
  std::map<std::tuple<std::size_t, bool, int>, Replay> replays_;
  int variant_ = 0;  // of the step
  std::int64_t replayed_ = 0;
  CudaStopwatch watch_;
};

}  // namespace kvlab
