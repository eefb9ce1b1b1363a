#include "run/cell_input.hpp"

#include <algorithm>

#include "experiment/build_policy.hpp"

namespace kvlab {

Engine make_engine(const CellInput& in, int slots) {
  EngineOptions o;
  o.slots = slots;
  for (const Item& item : in.items->items) o.max_tokens = std::max(o.max_tokens, item.most_tokens());
  o.page_size = in.policy().page_size;
  o.prefill_chunk = in.experiment->prefill_chunk;
  o.budget = in.policy().budget;
  o.device_limit = in.experiment->device_memory > 0 ? in.experiment->device_memory : -1;
  return Engine(in.model, build_policy(in.policy(), *in.catalog), o);
}

void want_room(Fit fit, const Engine& engine) {
  if (fit == Fit::ok) return;
  const Store& store = engine.store();
  throw OutOfMemory{"got a device limit of " + std::to_string(store.options().device_limit) +
                    " bytes, wanted room for more pages than the " + std::to_string(store.page_bytes(Tier::device)) +
                    " bytes held"};
}

}  // namespace kvlab
