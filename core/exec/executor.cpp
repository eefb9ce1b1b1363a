#include "exec/executor.hpp"

#include <kvlab/error.hpp>

#include <algorithm>

#include "base/put_off.hpp"
#include "exec/cpu_executor.hpp"
#include "exec/cuda_executor.hpp"
#include "exec/replay_executor.hpp"

namespace kvlab {

Fit Executor::prefill(int slot, std::span<const int> tokens, bool last, LayerHooks& hooks, View<float, 2> logits) {
  const auto n = static_cast<std::int64_t>(tokens.size());
  const int first = cache_.position(slot), most = cache_.shape().max_tokens;
  if (first + n > most)
    throw Error(Errc::internal,
                "got text positions up to " + std::to_string(first + n) + ", wanted at most " + std::to_string(most),
                "a prompt");
  std::vector<std::int32_t> position(tokens.size());
  for (std::size_t t = 0; t < position.size(); ++t) position[t] = first + static_cast<std::int32_t>(t);
  if (cache_.await_reloads({slot}) != Fit::ok) return Fit::out_of_memory;
  begin(tokens, position, hooks.wants_prompt_output() ? Phase::prompt_shown : Phase::prompt);
  embed(n);
  for (int layer = 0; layer < model_->config.layers; ++layer) {
    project(layer, n);
    if (first > 0 && hooks.before_prompt(layer, slot) != Fit::ok) return Fit::out_of_memory;
    PromptLayer info;
    info.layer = layer;
    info.slot = slot;
    info.last = last;
    info.masks = hooks.prompt_masks(layer);
    info.wants_lse = hooks.wants_prompt_lse();
    if (hooks.chooses_in_prompts()) {
      if (append_prompt(info, n, first) != Fit::ok) return Fit::out_of_memory;
      Fit fit = Fit::ok;
      const Selection read = hooks.select_chunk(info, fit);
      if (fit != Fit::ok) return fit;
      attend_chosen(info, n, first, read);
      cache_.workspace().reset();
    } else if (attend_prompt(info, n, first, hooks.wants_prompt_mass()) != Fit::ok) {
      return Fit::out_of_memory;
    }
    if (hooks.prompt(info) != Fit::ok) return Fit::out_of_memory;
    finish_layer(layer, n);
  }
  if (cache_.advance(slot, static_cast<int>(n), false).fit != Fit::ok) return Fit::out_of_memory;
  if (logits) logits.extent[0] = std::min(logits.extent[0], n);
  prompt_logits(n, logits);
  cache_.start_reloads();
  return Fit::ok;
}

Fit Executor::run_layers(const std::vector<std::int32_t>& slots, LayerHooks& hooks, const StepResult& out) {
  const auto n = static_cast<std::int64_t>(slots.size());
  int longest = 0;
  embed(n);
  for (int layer = 0; layer < model_->config.layers; ++layer) {
    project(layer, n);
    if (append(layer, slots) != Fit::ok) return Fit::out_of_memory;
    DecodeLayer info;
    static_cast<LayerRows&>(info) = rows_of(layer, n);
    info.slots = &slots;
    info.room = room(layer, slots);
    longest = std::max(longest, info.room);
    Fit fit = Fit::ok;
    const ops::MassColumn into = hooks.mass_into();
    {
      const PutOffScope scope;  // what select chooses, attention may choose
      info.read = hooks.select(info, fit);
      if (fit != Fit::ok) return fit;
      View<float, 3> mass;
      if (hooks.wants_mass() || into.column >= 0) mass = step_mass(n, info.room);
      info.output = attend(layer, slots, info.read, mass, into);
      if (into.column < 0) info.mass = mass;
      run_put_off();
    }
    if (info.read.left_out) fill_left_out(layer, slots, info.read.left_out);
    fit = hooks.attended(info);
    cache_.workspace().reset();
    if (fit != Fit::ok) return fit;
    finish_layer(layer, n);
  }
  cache_.end_layers();
  if (const Fit fit = hooks.finish_step(slots, longest); fit != Fit::ok) return fit;
  if (const Fit fit = cache_.end_step().fit; fit != Fit::ok) return fit;
  head(n, out);
  cache_.settle();
  return Fit::ok;
}

Fit Executor::decode(const std::vector<std::int32_t>& slots, std::span<const int> tokens, LayerHooks& hooks,
                     const StepResult& out) {
  std::vector<std::int32_t> position;
  for (const std::int32_t slot : slots) position.push_back(cache_.position(slot));
  if (cache_.await_reloads(slots) != Fit::ok) return Fit::out_of_memory;
  begin(tokens, position, Phase::decode);
  if (const Fit fit = run(slots, hooks, out); fit != Fit::ok) return fit;
  for (const std::int32_t slot : slots)
    if (cache_.advance(slot, 1, true).fit != Fit::ok) return Fit::out_of_memory;
  cache_.note_reloads();
  read(static_cast<std::int64_t>(slots.size()), out);
  cache_.start_reloads();
  return Fit::ok;
}

void check_executor(const Model& model, Device device) {
  if (device == Device::cuda) CudaExecutor::check(model);
}

std::unique_ptr<Executor> make_executor(std::shared_ptr<const Model> model, Store& store, bool batch_invariant) {
  if (CudaStore* cuda = store.cuda()) return std::make_unique<CudaExecutor>(std::move(model), *cuda, batch_invariant);
  return std::make_unique<CpuExecutor>(std::move(model), *store.cpu());
}

std::unique_ptr<Executor> make_replay_executor(std::shared_ptr<const Model> model, Store& store,
                                               const RecordedRows& rows) {
  if (!store.cpu()) throw Error(Errc::unsupported, "got a recording for a GPU, wanted backend: cpu");
  return std::make_unique<ReplayExecutor>(std::move(model), *store.cpu(), rows);
}

}  // namespace kvlab
