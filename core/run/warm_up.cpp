#include "run/warm_up.hpp"

#include <algorithm>
#include <new>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "base/log.hpp"
#include "experiment/policy_spec.hpp"
#include "ops/attend/attend_prompt.hpp"
#include "run/device.hpp"

namespace kvlab {
namespace {

constexpr std::size_t few_tokens = 16;
constexpr int few_steps = 3;  // per number of rows: the second step captures a graph, the third launches it

int length_of(const Item& item) { return ops::prompt_room(static_cast<int>(item.prompt.size())); }

// Everything that decides which kernels run, except the prompt's length.
std::string shape_of(const CellInput& in, int slots) {
  auto policy = to_json(in.policy());
  if (policy.contains("budget"))
    for (const char* amount : {"tokens", "ratio", "bytes"}) policy["budget"].erase(amount);
  const EngineOptions o = engine_options(in, slots);
  return in.model->fingerprint + "/" + name_of(in.model->dtype) + "/" + std::to_string(static_cast<int>(o.device)) +
         "/" + std::to_string(slots) + "/" + std::to_string(o.prefill_chunk) + "/" + std::to_string(o.batch_invariant) +
         std::to_string(o.graphs) + "/" + policy.dump();
}

// Prefills the given prompt in the first slot and short ones in the others. Then it runs steps of all rows, of one row
// fewer, and so on.
void run_shape(Engine& engine, const Item& item, int slots) {
  const log::Muted short_prompts;  // a budget that is a ratio may be too small for them
  std::vector<float> logits(static_cast<std::size_t>(engine.model().config.vocab));
  const auto view = View<float, 2>::dense(logits.data(), {1, static_cast<std::int64_t>(logits.size())});
  std::vector<std::int32_t> rows;
  for (int s = 0; s < slots; ++s) {
    rows.push_back(engine.open());
    const std::size_t tokens = s == 0 ? item.prompt.size() : std::min(item.prompt.size(), few_tokens);
    if (engine.prefill(rows.back(), {item.prompt.data(), tokens}, true, view) != Fit::ok) return;
  }
  const Store& store = engine.store();
  const auto full = [&](std::int32_t slot) { return store.position(slot) >= store.shape().max_tokens; };
  for (; !rows.empty(); rows.erase(rows.begin())) {
    const std::vector<int> tokens(rows.size(), item.prompt.front());
    std::vector<std::int32_t> likeliest(rows.size());
    for (int i = 0; i < few_steps && std::none_of(rows.begin(), rows.end(), full); ++i)
      if (engine.step(rows, tokens, StepResult(likeliest)) != Fit::ok) return;
    engine.close(rows.front());
  }
}

}  // namespace

std::vector<const Item*> prompts_of_shapes(const std::vector<Item>& items) {
  std::vector<const Item*> all;
  for (const Item& item : items) all.push_back(&item);
  std::stable_sort(all.begin(), all.end(),
                   [](const Item* a, const Item* b) { return a->prompt.size() > b->prompt.size(); });
  all.erase(
      std::unique(all.begin(), all.end(), [](const Item* a, const Item* b) { return length_of(*a) == length_of(*b); }),
      all.end());
  return all;
}

int warm_shapes(const CellInput& in, int slots) {
  static std::set<std::string> warmed;
  const std::string shape = shape_of(in, slots);
  int prompts = 0;
  for (const Item* item : prompts_of_shapes(in.items->items)) {
    if (!warmed.insert(shape + "/" + std::to_string(length_of(*item))).second) continue;
    try {
      Engine engine = make_engine(in, slots);
      run_shape(engine, *item, slots);
    } catch (const std::bad_alloc&) {  // NoRoom too
    }
    ++prompts;
  }
  return prompts;
}

Engine warmed_engine(const CellInput& in, int slots) {
  if (in.wants(Metric::latency) && device_of(*in.experiment) == Device::cuda) warm_shapes(in, slots);
  return make_engine(in, slots);
}

void touch(Engine& engine, const Item& item) {
  const log::Muted short_prompt;
  const int slot = engine.open();
  const std::size_t n = std::min(item.prompt.size(), few_tokens);
  engine.prefill(slot, {item.prompt.data(), n}, true, {});
  std::int32_t likeliest = 0;
  for (int i = 0; i < 2 && static_cast<int>(n) + i < engine.store().shape().max_tokens; ++i)
    engine.step({slot}, {item.prompt.data(), 1}, StepResult(std::span(&likeliest, 1)));
  engine.close(slot);
  engine.ledger().reset_peak();
}

}  // namespace kvlab
