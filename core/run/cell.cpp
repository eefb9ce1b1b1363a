#include "run/cell.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <kvlab/error.hpp>
#include <limits>
#include <new>

#include "base/backend.hpp"
#include "base/log.hpp"
#include "base/stream_memory.hpp"
#include "compose/compose.hpp"
#include "engine/store_options.hpp"
#include "plugin/budget_tokens.hpp"
#include "result/warnings.hpp"
#include "run/cannot_go_on.hpp"
#include "run/equal_bytes.hpp"
#include "run/fidelity.hpp"
#include "run/nonfinite.hpp"
#include "run/plain_pass.hpp"
#include "run/replay.hpp"
#include "run/requests.hpp"
#include "run/serve.hpp"
#include "run/summary.hpp"
#include "store/host_tier.hpp"

namespace kvlab {

using results::CellResult;

namespace {

// Nothing else knows beforehand what a sequence will be fed.
std::shared_ptr<FullRuns> full_runs_for(const CellInput& in, const Needs& needs) {
  if (!needs.future_mass() || in.workload()) return nullptr;
  return in.replay_shared ? in.replay_shared->full_runs(in.cell->task, in.cell->seed, in.policy().page_size)
                          : std::make_shared<FullRuns>();
}

// Sequences that the cell runs at once, at most.
int slots_of(const CellInput& in) {
  const std::vector<Item>& items = in.items->items;
  const auto follows = [](const Item& item) { return item.follows; };
  const std::size_t count = in.rows ? 1
                            : in.workload()
                                ? make_requests(*in.workload(), items, in.cell->seed, in.experiment->folder).size()
                                : items.size() - static_cast<std::size_t>(std::ranges::count_if(items, follows));
  return static_cast<int>(std::min<std::size_t>(count, static_cast<std::size_t>(std::max(1, in.experiment->batch))));
}

// Refuses a host_memory that the run cannot have.
void check_host_memory(const CellInput& in) {
  const EngineOptions o = engine_options(in, std::max(1, slots_of(in)));
  const StoreOptions store = store_options(*in.model, *cell_policy(in), o);
  if (takes_host_tier(store) && (o.device == Device::cpu || cuda_backend())) check_host_tier(store);
}

// A policy may refuse a prompt where it says what its sequence will hold. The longest one needs most.
void check_prompts(const CellInput& in, const Policy& attached) {
  if (!in.policy().policy) return;
  std::vector<const Item*> items;
  for (const Item& item : in.items->items)
    if (!item.prompt.empty()) items.push_back(&item);
  std::ranges::stable_sort(items, std::greater<>(), [](const Item* item) { return item->prompt.size(); });
  for (const Item* item : items) {
    const auto prompt = static_cast<int>(item->prompt.size());
    static_cast<void>(attached.demand(prompt, item->most_tokens() - prompt));
  }
}

// A policy refuses a number of tokens that its pins would fill. The same number as a share or in bytes is known for the
// longest sequence alone, and shorter ones have less.
void check_least_budget(const CellInput& in, EngineOptions o) {
  if (!in.policy().policy || (o.budget.kind != BudgetAmount::ratio && o.budget.kind != BudgetAmount::bytes)) return;
  const auto policy = cell_policy(in);
  const Needs needs = policy->needs();
  const Shape shape = store_options(*in.model, *policy, o).shape;
  const int tokens =
      budget_tokens(o.budget, o.max_tokens, shape, page_bytes(shape, policy->codecs()[0], needs), needs.dense_layers());
  if (tokens == std::numeric_limits<int>::max()) return;  // everything
  o.budget = {BudgetAmount::tokens, static_cast<double>(tokens)};
  try {
    Engine::check(*in.model, *policy, o);
    if (in.policy().budget.kind == BudgetAmount::bytes) check_prompts(in, *policy);
  } catch (const Error& e) {
    throw Error(e.code(), "the budget gives the longest sequence, of " + std::to_string(o.max_tokens) + " tokens, " +
                              std::to_string(tokens) + ": " + e.message());
  }
}

// Refuses equal_bytes that no budget of the entry can meet: a page of each KV head takes more. What a method always
// keeps may take more than that, too, which its cell finds. A policy of its own may hold less.
void check_equal_bytes(const CellInput& in, const EngineOptions& o) {
  if (in.policy().policy) return;
  const auto policy = cell_policy(in);
  const Needs needs = policy->needs();
  const Shape shape = store_options(*in.model, *policy, o).shape;
  std::int64_t page = std::numeric_limits<std::int64_t>::max();
  for (const CodecSpec& codec : policy->codecs()) page = std::min(page, page_bytes(shape, codec, needs));
  std::size_t shortest = std::numeric_limits<std::size_t>::max();
  for (const Item& item : in.items->items) shortest = std::min(shortest, item.prompt.size() + item.fed.size());
  const int dense = needs.dense_layers();
  const std::int64_t of_dense = bytes_of_layers(dense, static_cast<std::int64_t>(shortest), shape, page),
                     least = of_dense + bytes_of_layers(shape.layers - dense, 1, shape, page);
  if (static_cast<double>(in.experiment->equal_bytes) * (1 + bytes_apart) >= static_cast<double>(least)) return;
  const std::string layers = dense == 0 ? ""
                                        : fmt::format("all tokens of {} dense layer{}, {} bytes, and ", dense,
                                                      dense == 1 ? "" : "s", of_dense);
  throw Error(Errc::config,
              fmt::format("got equal_bytes of {}, wanted at least {} for '{}': it holds {}a page for each KV head",
                          in.experiment->equal_bytes, least, in.policy().name, layers));
}

// K and V of the cell's longest sequence in the full cache.
double full_bytes(const CellInput& in, std::int64_t tokens) {
  const ModelConfig& c = in.model->config;
  return static_cast<double>(tokens) * c.layers * c.kv_heads * 2 * c.head_dim *
         static_cast<double>(size_of(in.model->dtype));
}

}  // namespace

void check_cell(const CellInput& given) {
  CellInput in = given;
  const Needs needs = cell_policy(in)->needs();
  if (needs.future_mass() && in.workload())
    throw Error(Errc::config,
                "got a workload for '" + in.policy().name +
                    "', wanted none: it looks at a run of the full cache on the same prompts, one by one");
  if (needs.future_mass() && in.experiment->sampling.on())
    throw Error(Errc::config, "got sampling for '" + in.policy().name +
                                  "', wanted none: it looks at a run of the full cache, whose answers are other ones");
  if (in.experiment->sampling.on() && !in.experiment->recording.empty())
    throw Error(Errc::config, "got sampling for a replay, wanted none: a recording has the full cache's own answers");
  if (needs.output_projection() && !in.experiment->recording.empty())
    throw Error(Errc::config,
                "got '" + in.policy().name +
                    "' for a replay, wanted a policy without projected_norms(): a recording has no output projection");
  if (needs.next_queries() && !in.experiment->recording.empty())
    throw Error(Errc::config, "got '" + in.policy().name +
                                  "' for a replay, wanted a policy without next_queries(): a recording has no hidden "
                                  "states");
  if (needs.token_ids() && !in.experiment->recording.empty())
    throw Error(Errc::config, "got '" + in.policy().name +
                                  "' for a replay, wanted a policy without token_ids(): a recording has no tokenizer, "
                                  "which says which tokens are special or punctuation");
  in.full_runs = full_runs_for(in, needs);
  EngineOptions o = engine_options(in, 1);
  // The cell seeks its budget, and fails where the least one of its method holds more: others of a table have rows.
  if (seeks_budget(in)) {
    check_equal_bytes(in, o);
    o.budget = {BudgetAmount::tokens, static_cast<double>(o.max_tokens)};
  }
  const auto policy = cell_policy(in);
  Engine::check(*in.model, *policy, o);
  check_prompts(in, *policy);
  check_host_memory(in);
  check_least_budget(in, o);
  try {
    limited_options(in, 1);
  } catch (const NoRoom& e) {
    throw Error(Errc::config, e.what());
  }
}

CellResult broken_cell(const CellInput& in, const std::string& status, const std::string& error) {
  CellResult out;
  describe_cell(in, out);
  out.summary.status = status;
  out.summary.error = error;
  return out;
}

CellResult broken_cell(const CellInput& in, const NonFinite& error) {
  CellResult out = broken_cell(in, "failed", error.what());
  out.summary.nonfinite = error.count();
  return out;
}

namespace {

CellResult passes(const CellInput& given) {
  CellInput in = given;
  if (in.rows) return replay(in);
  const std::optional<HeldBytes> found = equal_budget(in);
  if (found) in.found_budget = BudgetAmount{BudgetAmount::tokens, static_cast<double>(found->tokens)};
  CellResult out;
  describe_cell(in, out);
  if (in.workload()) {
    const log::Timed timed("cell " + in.cell->id + ": requests");
    serve(in, out);
    return out;
  }
  PlainPass::Answers answers;
  {
    const log::Timed timed("cell " + in.cell->id + ": plain pass");
    answers = PlainPass(in, out).run();  // its engine is gone before the next pass takes memory
  }
  if (in.wants(Metric::fidelity)) {
    const log::Timed timed("cell " + in.cell->id + ": fidelity");
    measure_fidelity(in, answers.outputs, out);
  }
  summarize(in, answers.forced, out);
  note_equal_bytes(in, found, out.summary.device_bytes_decode);
  return out;
}

CellResult passes_or_error(const CellInput& in) {
  try {
    try {
      return passes(in);
    } catch (const NonFiniteStep& e) {
      throw located(
          in.model, [&] { return cell_policy(in); }, engine_options(in, 1), e);
    }
  } catch (const CannotGoOn&) {
    throw;
  } catch (const NonFinite& e) {
    return broken_cell(in, e);
  } catch (const OutOfMemory& e) {  // half of a cell is no result: numbers from before the error are dropped
    return broken_cell(in, "oom", e.what);
  } catch (const NoRoom& e) {
    return broken_cell(in, "oom", e.what());
  } catch (const std::bad_alloc&) {
    return broken_cell(in, "oom", "got no memory, wanted more: the operating system or the device refused it");
  } catch (const std::exception& e) {
    return broken_cell(in, "failed", e.what());
  }
}

// Notes what the policy needs of the run. What is wrong with it becomes the cell's error later.
void prepare_for(CellInput& in) {
  try {
    const Needs needs = cell_policy(in)->needs();
    in.oracle = needs.oracle();
    in.functional = needs.functional();
    in.full_runs = full_runs_for(in, needs);
  } catch (const std::exception&) {
    in.oracle = in.functional = false;
  }
}

// 1 if the policy's scorer ranks tokens by their age alone, 0 if not; -1 without a scorer, or if it cannot be asked.
std::int64_t ranks_by_age(const CellInput& in) {
  const std::optional<PluginUse>& use = in.policy().scorer;
  const PluginInfo* plugin = use ? in.catalog->find(use->role, use->name) : nullptr;
  if (!plugin) return -1;
  try {
    return create<Scorer>(*plugin, use->params)->by_age();
  } catch (const std::exception&) {
    return -1;
  }
}

// Why the row would be the full cache's under another name, or "". A budget says that a method had to act. Without one,
// a method that rewrites had to change a number, a codec to code, and pages to move where their places are named.
std::string did_nothing(const CellInput& in, const results::SummaryRow& row) {
  const PolicySpec& policy = in.policy();
  if (std::string idle = results::never_acted(row, full_bytes(in, row.context_tokens), policy.codec.has_value());
      !idle.empty())
    return idle;
  if (row.status != "ok") return "";
  if (in.functional && row.fired == 0) return row.policy + " changed no key and no value: fired 0";
  const PluginInfo* codec = policy.codec ? in.catalog->find(Role::codec, policy.codec->name) : nullptr;
  if (codec && codes_nothing(*create<Codec>(*codec, policy.codec->params)))  // an ablation: others are refused
    return row.policy + " codes nothing: its codec stores keys and values in the run's dtype";
  const bool steps = row.output_tokens > row.samples;
  if (policy.placement.tier == Tier::host && in.experiment->spill == "always" && steps && row.fired == 0 &&
      policy.placement.resident > 0 &&
      static_cast<double>(policy.placement.resident) < 0.95 * static_cast<double>(row.context_tokens) &&
      row.moved_device + row.moved_host == 0)
    return fmt::format("{} moved no page: {} of {} tokens were to stay on the device", row.policy,
                       policy.placement.resident, row.context_tokens);
  return "";
}

// Warns of a policy plugin that kept everything where no budget says that it had to act. Its entry names none, or it
// decides by itself how much it keeps, and a context may be shorter than its windows. An edit that gives pages another
// codec fires, so here all have the first.
void warn_of_idle(const CellInput& in, const results::SummaryRow& row) {
  if (row.status != "ok" || in.functional || row.fired != 0 || row.output_tokens <= row.samples || !in.policy().policy)
    return;
  const auto policy = cell_policy(in);
  if (!policy->needs().own_amount() && in.budget().kind != BudgetAmount::unlimited) return;
  const CodecSpec first = policy->codecs().front();
  log::warn(
      fmt::format("{} left nothing out of {} tokens: fired 0, so its row is {}", row.policy, row.context_tokens,
                  first.k.bits || first.v.bits ? "that of the full cache in its first codec" : "the full cache's"));
}

}  // namespace

CellResult run_cell(const CellInput& given) {
  const log::Collected said;
  CellInput in = given;
  prepare_for(in);
  CellResult out = passes_or_error(in);
  const std::int64_t by_age = out.summary.by_age = ranks_by_age(in);
  if (const std::string idle = did_nothing(in, out.summary); !idle.empty()) {
    out = broken_cell(in, "failed", idle + ": such a row would be the full cache's under another name");
    out.summary.by_age = by_age;
  }
  warn_of_idle(in, out.summary);
  out.summary.warnings = results::column_of(said.warnings());
  return out;
}

}  // namespace kvlab
