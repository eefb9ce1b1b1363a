#include "run/equal_bytes.hpp"

#include <fmt/format.h>
#include <kvlab/error.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <string>
#include <vector>

#include "base/log.hpp"
#include "base/stream_memory.hpp"
#include "plugin/loader.hpp"
#include "run/plain_pass.hpp"

namespace kvlab {
namespace {

constexpr std::size_t trial_contexts = 2;

std::string megabytes(double bytes) { return fmt::format("{:.4g} MB", bytes / 1e6); }

// The conversations of the first contexts, one draw of each.
TaskItems first_contexts(const TaskItems& all) {
  TaskItems first = all;
  std::size_t contexts = 0, end = 0;
  for (; end < all.items.size(); ++end)
    if ((end == 0 || all.items[end].sample != all.items[end - 1].sample) && ++contexts > trial_contexts) break;
  first.items.resize(end);
  std::erase_if(first.items, [](const Item& item) { return item.draw > 0; });
  return first;
}

// What a budget holds that does not fit in memory, and one that the policy refuses when it sees a prompt.
constexpr double too_many_bytes = std::numeric_limits<double>::infinity(), refused_budget = -too_many_bytes;

// Runs the cell's first contexts with a budget, without times and traces.
class Trials {
 public:
  explicit Trials(const CellInput& in) : experiment_(*in.experiment), items_(first_contexts(*in.items)), in_(in) {
    experiment_.metrics = {Metric::memory};
    experiment_.batch = 1;
    experiment_.sampling.draws = 1;
    in_.experiment = &experiment_;
    in_.items = &items_;
    in_.progress = {};
  }

  double held(int tokens) {
    const log::Muted warnings_of_trials;
    results::CellResult out;
    in_.found_budget = of(tokens);
    try {
      PlainPass(in_, out).run();
    } catch (const OutOfMemory&) {
      return too_many_bytes;
    } catch (const std::bad_alloc&) {
      return too_many_bytes;
    } catch (const Error& e) {
      if (e.code() != Errc::config) throw;
      refusal_ = e;
      return refused_budget;
    }
    if (!std::isfinite(out.summary.device_bytes_decode))
      throw Error(Errc::config, "got answers of one token with equal_bytes, wanted decode steps to measure bytes in");
    return out.summary.device_bytes_decode;
  }

  // Whether the policy takes so small a budget.
  bool takes(int tokens) {
    const log::Muted warnings_of_trials;
    in_.found_budget = of(tokens);
    try {
      Engine::check(*in_.model, *cell_policy(in_), engine_options(in_, 1));
      return true;
    } catch (const Error&) {
      return false;
    }
  }

  int most_tokens() const { return engine_options(in_, 1).max_tokens; }

  // For a search that found no budget.
  [[noreturn]] void give_up() const {
    if (refusal_) throw *refusal_;
    throw NoRoom("got no room for the smallest budget of equal_bytes");
  }

 private:
  static BudgetAmount of(int tokens) { return {BudgetAmount::tokens, static_cast<double>(tokens)}; }

  Experiment experiment_;
  TaskItems items_;
  CellInput in_;
  std::optional<Error> refusal_;
};

// The next budget to try between two that bracket the bytes: on the line through both, and every second time at their
// geometric mean, because bytes grow no more where a budget holds all. Whole pages come first: most policies hold
// those.
int between(const HeldBytes& low, const HeldBytes& high, double wanted, int page_size, std::size_t trials) {
  const double line = (wanted - low.bytes) / (high.bytes - low.bytes) * (high.tokens - low.tokens);
  const double at = trials % 2 == 0 && std::isfinite(high.bytes - low.bytes) ? low.tokens + line
                                                                             : std::sqrt(1. * low.tokens * high.tokens);
  const int inside = static_cast<int>(std::lround(at));
  const int pages = (inside + page_size / 2) / page_size * page_size;
  if (pages > low.tokens && pages < high.tokens) return pages;
  const int up = (low.tokens / page_size + 1) * page_size;
  if (up < high.tokens) return up;
  return std::clamp(inside, low.tokens + 1, high.tokens - 1);
}

// Why the smallest budget holds so much, where the policy evicts at the prompt's end alone; else "".
std::string what_stays(const CellInput& in) {
  const PolicySpec& policy = in.policy();
  const PluginInfo* scorer = policy.scorer ? in.catalog->find(policy.scorer->role, policy.scorer->name) : nullptr;
  if (!scorer || policy.schedule.every.value_or(create<Scorer>(*scorer, policy.scorer->params)->every()) > 0) return "";
  const std::string stays = ". It evicts at the prompt's end alone, so tokens of later steps stay";
  Experiment experiment = *in.experiment;
  experiment.policies[in.cell->policy].schedule.every = 1;
  CellInput evicting = in;
  evicting.experiment = &experiment;
  try {
    cell_policy(evicting);
    return stays + ": with schedule: {every: 1} it evicts in decode steps, too";
  } catch (const Error&) {
    return stays;
  }
}

}  // namespace

bool seeks_budget(const CellInput& in) {
  const PolicySpec& policy = in.policy();
  const bool reads_only = policy.selector && policy.placement.tier == Tier::device;
  return in.experiment->equal_bytes > 0 && policy.budget.kind == BudgetAmount::bytes && !reads_only;
}

HeldBytes nearest_budget(double wanted, int least, int most, int page_size, const std::function<double(int)>& held) {
  std::vector<HeldBytes> tried;
  const auto trial = [&](int tokens) {
    tried.push_back({tokens, held(tokens)});
    return tried.back();
  };
  const auto apart = [&](const HeldBytes& t) { return std::fabs(t.bytes - wanted); };
  HeldBytes low = trial(least);
  if (least < most && low.bytes < wanted) {
    HeldBytes high = trial(most);
    while (high.bytes > wanted && high.tokens - low.tokens > 1 && tried.size() < most_trials &&
           std::min(apart(low), apart(high)) > bytes_equal * wanted) {
      const HeldBytes t = trial(between(low, high, wanted, page_size, tried.size()));
      (t.bytes <= wanted ? low : high) = t;
    }
  }
  return *std::min_element(tried.begin(), tried.end(), [&](const HeldBytes& a, const HeldBytes& b) {
    return apart(a) != apart(b) ? apart(a) < apart(b) : a.tokens > b.tokens;
  });
}

std::optional<HeldBytes> equal_budget(const CellInput& in) {
  if (!seeks_budget(in)) return std::nullopt;
  const PolicySpec* policy = &in.policy();
  const log::Timed timed("cell " + in.cell->id + ": budget of equal_bytes");
  Trials trials(in);
  const double wanted = static_cast<double>(in.experiment->equal_bytes);
  const int most = trials.most_tokens();
  int least = 1;  // the smallest budget that the policy takes
  for (int refused = 0, taken = most; taken - refused > 1;) {
    const int middle = refused + (taken - refused) / 2;
    (trials.takes(middle) ? taken : refused) = middle;
    least = taken;
  }
  int done = 0;
  const HeldBytes found = nearest_budget(wanted, least, most, policy->page_size, [&](int tokens) {
    if (in.progress) in.progress("equal_bytes", ++done, most_trials);
    return trials.held(tokens);
  });
  if (!std::isfinite(found.bytes)) trials.give_up();
  log::debug(fmt::format("cell {}: {} tokens hold {:.0f} bytes", in.cell->id, found.tokens, found.bytes));
  if (found.tokens == least && found.bytes > wanted * (1 + bytes_apart))
    throw Error(Errc::config,
                fmt::format("got equal_bytes of {}, wanted at least {}: '{}' holds that with a budget of {}, the "
                            "smallest that it takes{}",
                            megabytes(wanted), megabytes(found.bytes), policy->name,
                            least == 1 ? "1 token" : std::to_string(least) + " tokens", what_stays(in)),
                policy->where);
  return found;
}

void note_equal_bytes(const CellInput& in, const std::optional<HeldBytes>& found, double measured) {
  if (in.experiment->equal_bytes == 0) return;
  const PolicySpec& policy = in.policy();
  const double wanted = static_cast<double>(in.experiment->equal_bytes);
  if (policy.budget.kind == BudgetAmount::unlimited)
    return log::warn(fmt::format("equal_bytes leaves '{}' as it is: it takes no budget", policy.name));
  if (!found)
    return log::warn(fmt::format("equal_bytes: '{}' evicts nothing, so a step reads {} and the device holds all",
                                 policy.name, megabytes(wanted)));
  // Sequences of a batch hold bytes together; then the trial's sequence speaks for each.
  const double held = in.experiment->batch == 1 ? measured : found->bytes;
  if (const double off = held / wanted - 1; std::fabs(off) > bytes_apart)
    log::warn(fmt::format("equal_bytes: '{}' holds {} in place of {}, {:+.1f} %; its nearest budget held {} in trials",
                          policy.name, megabytes(held), megabytes(wanted), 100 * off, megabytes(found->bytes)));
}

}  // namespace kvlab
