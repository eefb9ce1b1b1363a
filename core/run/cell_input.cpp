#include "run/cell_input.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "base/log.hpp"
#include "experiment/build_policy.hpp"
#include "run/device.hpp"
#include "run/recorded.hpp"

namespace kvlab {

EngineOptions engine_options(const CellInput& in, int slots) {
  EngineOptions o;
  o.device = device_of(*in.experiment);
  o.slots = slots;
  for (const Item& item : in.items->items) o.max_tokens = std::max(o.max_tokens, item.most_tokens());
  o.page_size = in.policy().page_size;
  o.prefill_chunk = in.experiment->prefill_chunk;
  o.batch_invariant = in.experiment->batch_invariant;
  o.budget = in.budget();
  o.recorded = in.full_runs.get();
  o.rows = in.rows.get();
  o.spill = in.experiment->spill == "always" ? Spill::always : Spill::pressure;
  o.copy_by_host = in.experiment->page_copies == "memcpy";
  o.host_limit = in.experiment->host_memory > 0 ? in.experiment->host_memory : -1;
  return o;
}

namespace {

// A selector has lists alone. Policies warn themselves, when they run (compose/injection.hpp).
void warn_of_inject(const InjectSpec& inject, const std::string& policy) {
  const std::pair<const char*, bool> keys[] = {{"rerank_overlap", inject.rerank_overlap.has_value()},
                                               {"correction", inject.correction.has_value()},
                                               {"drift", inject.drift.has_value()}};
  std::string unused;
  for (const auto& [key, set] : keys)
    if (set) unused += (unused.empty() ? "" : " and ") + std::string(key);
  if (!unused.empty())
    log::warn("got inject of " + unused + " with selector '" + policy +
              "', wanted a policy that chooses by itself: these keys change nothing in it");
}

}  // namespace

std::shared_ptr<Policy> cell_policy(const CellInput& in) {
  const InjectSpec& inject = in.experiment->inject;
  if (!inject.used(in.policy())) return build_policy(in.policy(), *in.catalog, in.profile.get());
  if (!in.policy().policy) warn_of_inject(inject, in.policy().name);
  Injection injection;
  const auto millionths = [](double share) { return static_cast<std::int32_t>(std::lround(share * 1e6)); };
  if (inject.overlap) injection.overlap = millionths(*inject.overlap);
  if (inject.rerank_overlap && in.policy().policy) injection.rerank_overlap = millionths(*inject.rerank_overlap);
  if (inject.correction) injection.correction = millionths(*inject.correction);
  if (inject.drift) injection.drift = millionths(*inject.drift);
  injection.where = inject.where;
  injection.seed = static_cast<std::uint64_t>(in.cell->seed);
  if (in.recorded) {
    injection.recorded = in.recorded;
    injection.follows = follow(*in.recorded, in.items->items);
  }
  return build_policy(in.policy(), *in.catalog, in.profile.get(), std::move(injection));
}

EngineOptions limited_options(const CellInput& in, int slots) {
  EngineOptions o = engine_options(in, slots);
  if (const std::int64_t bytes = in.experiment->device_memory; bytes > 0)
    Engine::fit(o, bytes, *in.model, *cell_policy(in));
  return o;
}

Engine make_engine(const CellInput& in, int slots) {
  return Engine(in.model, cell_policy(in), limited_options(in, slots));
}

void want_room(Fit fit, const Engine& engine) {
  if (fit == Fit::ok) return;
  const Store& store = engine.store();
  const std::int64_t room = store.page_limit();
  const bool tiers = store.options().host_pages || store.options().archive;
  std::string text = room >= 0 ? "got a device with room for " + std::to_string(room) + " bytes of pages"
                     : tiers   ? "got a full device or host"
                               : "got a full device";
  text += ", wanted room for more pages than the " + std::to_string(store.page_bytes(Tier::device)) + " bytes held";
  // The tier that was full is not known: an edit that needs more of the host than there is takes none of it.
  if (tiers) text += " on the device or the " + std::to_string(store.page_bytes(Tier::host)) + " on the host";
  if (const std::int64_t host = store.options().host_limit; tiers && host >= 0)
    text += ", where host_memory allows " + std::to_string(host);
  throw OutOfMemory{std::move(text)};
}

}  // namespace kvlab
