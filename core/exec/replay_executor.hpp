// The CPU's executor without a model: a recording gives the queries, keys and values. Only attention of decode steps is
// computed. It makes no logits, and PromptLayer::output stays empty.
#pragma once
#include "exec/cpu_executor.hpp"
#include "exec/recorded_rows.hpp"

namespace kvlab {

class ReplayExecutor final : public CpuExecutor {
 public:
  // model: an outline serves. Borrows the rows, those of the one sequence that runs.
  ReplayExecutor(std::shared_ptr<const Model> model, CpuStore& store, const RecordedRows& rows);

 protected:
  void begin(std::span<const int> tokens, const std::vector<std::int32_t>& position, Phase phase) override;
  void embed(std::int64_t rows) override;
  void project(int layer, std::int64_t rows) override;
  // Errc::config for a chunk that is not the whole prompt: mass was summed over all queries.
  Fit attend_prompt(PromptLayer& info, std::int64_t rows, int first, bool mass) override;
  void finish_layer(int layer, std::int64_t rows) override;
  void prompt_logits(std::int64_t rows, const View<float, 2>& of_last) override;
  void head(std::int64_t rows, const StepResult& out) override;
  void read(std::int64_t rows, const StepResult& out) override;
  void rotate_token(int layer, int slot, std::int64_t row, std::int64_t ahead) override;

 private:
  // Of RoPE at a position below max_tokens, the other way round with `back`.
  struct Angle {
    const float *cosine, *sine;
  };
  Angle angle(std::int64_t position, bool back) const;

  const RecordedRows& recorded_;
  std::vector<float> turns_;  // [position, 3, head_dim / 2] cosine, sine and -sine, where RoPE goes by rank
  bool in_place_ = false;     // the call's rows are a prompt's, as they lie in the recording
};

}  // namespace kvlab
