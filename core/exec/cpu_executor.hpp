// The executor on the CPU: activations in f32, weights packed for the GEMMs of ops/linear/linear.hpp.
#pragma once
#include "base/finite.hpp"
#include "exec/executor.hpp"
#include "store/cpu_store.hpp"

namespace kvlab {

class CpuExecutor final : public Executor {
 public:
  CpuExecutor(std::shared_ptr<const Model> model, CpuStore& store);

  Fit prefill(int slot, std::span<const int> tokens, bool last, LayerHooks& hooks, View<float, 2> logits) override;
  Fit decode(const std::vector<std::int32_t>& slots, std::span<const int> tokens, LayerHooks& hooks,
             const StepResult& out) override;

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
  // Notes what is not finite for nonfinite_rows: `count` numbers of a row, or what the cache gets of `tokens` tokens.
  void look_at(std::int64_t row, const float* x, std::int64_t count, float limit = finite_limit(DType::f32));
  void look_at_entries(std::int64_t row, std::int64_t first, std::int64_t tokens);
  void note_rows();

  CpuStore& store_;
  Qkv qkv_;
  std::vector<float> x_, hidden_, wide_, attention_, mass_, logits_;
  std::vector<char> nonfinite_;  // [row] of the call under way
  std::vector<float> angles_;    // original regime: [row, 2, head_dim / 2] cos and sin
};

}  // namespace kvlab
