// The executor on the CPU: activations in f32, weights packed for the GEMMs of ops/linear/linear.hpp.
#pragma once
#include "base/finite.hpp"
#include "exec/executor.hpp"
#include "store/cpu_store.hpp"

namespace kvlab {

class CpuExecutor : public Executor {
 public:
  CpuExecutor(std::shared_ptr<const Model> model, CpuStore& store);
  void project_output(int layer, int head, const float* x, std::int64_t rows, float* y) const override;
  void queries_ahead(int layer, std::int64_t rows, float* out) override;

 protected:
  void begin(std::span<const int> tokens, const std::vector<std::int32_t>& position, Phase phase) override;
  void embed(std::int64_t rows) override;
  void project(int layer, std::int64_t rows) override;
  Fit attend_prompt(PromptLayer& info, std::int64_t rows, int first, bool mass) override;
  Fit append_prompt(PromptLayer& info, std::int64_t rows, int first) override;
  void attend_chosen(PromptLayer& info, std::int64_t rows, int first, const Selection& read) override;
  Fit append(int layer, const std::vector<std::int32_t>& slots) override;
  LayerRows rows_of(int layer, std::int64_t rows) override;
  View<float, 3> step_mass(std::int64_t rows, std::int64_t tokens) override;
  View<const float, 3> attend(int layer, const std::vector<std::int32_t>& slots, const Selection& read,
                              const View<float, 3>& mass, ops::MassColumn mass_into) override;
  void fill_left_out(int layer, const std::vector<std::int32_t>& slots, const LeftOut& what) override;
  void finish_layer(int layer, std::int64_t rows) override;
  void prompt_logits(std::int64_t rows, const View<float, 2>& of_last) override;
  void head(std::int64_t rows, const StepResult& out) override;
  void read(std::int64_t rows, const StepResult& out) override;

  // What follows is for executors that get rows in another way.
  struct Qkv {
    std::vector<float> q, k, v, raw_q, raw_k;
    void resize(std::size_t rows, const ModelConfig& c, bool raw);
  };
  bool by_rank() const { return store_.options().rope != RopeRegime::original; }  // RoPE uses ranks, not text positions
  std::int64_t key_width() const { return std::int64_t{model_->config.kv_heads} * model_->config.head_dim; }
  const float* cached_keys() const;
  virtual void rotate_token(int layer, int slot, std::int64_t row, std::int64_t ahead);
  void note_rows();

  CpuStore& store_;
  std::vector<std::int32_t> position_;  // text positions of the current call's tokens
  Qkv qkv_;

 private:
  void make_rows(PromptLayer& info, std::int64_t n);
  void project_block(const ModelLayer& l, const float* x, std::int64_t rows, std::int64_t at);
  void add_angle(int position);
  void logits_of(const float* x, std::int64_t rows, View<float, 2> out);
  // Both look for numbers that are not finite: among `count` numbers of a row, or in keys and values of `tokens`
  // tokens.
  void look_at(std::int64_t row, const float* x, std::int64_t count, float limit = finite_limit(DType::f32));
  void look_at_entries(std::int64_t row, std::int64_t first, std::int64_t tokens);

  Ledger unread_;
  StoreWorkspace workspace_{unread_, Stream::cpu()};  // of attention; the store's own is the policy's
  std::vector<int> tokens_;                           // tokens of the current call
  std::vector<float> x_, hidden_, wide_, attention_, mass_, logits_, lse_;
  View<float, 2> step_logits_;   // logits of the decode step; empty if the caller asks for none
  std::vector<char> nonfinite_;  // [row] of the current call
  std::vector<float> angles_;    // original regime: [row, 2, head_dim / 2] cos and sin
};

}  // namespace kvlab
