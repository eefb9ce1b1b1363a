#include "ops/select/spread.hpp"

#include <string>

#include "base/device_op.hpp"
#include "base/joined_calls.hpp"
#include "ops/page/check.hpp"

namespace kvlab::ops {
namespace {

void check_flags(const PagedKv& kv, const HeadFlags& flags, const char* what, const char* op) {
  if (!flags || flags.extent[1] < kv.kv_heads)
    fail(Errc::internal, op, std::string("got too few flags '") + what + "', wanted [slot, kv_head]");
}

}  // namespace

void SpreadHeads::run(const std::vector<SpreadHeads>& calls) {
  if (!cuda_reach_from_host()) return only_on_cuda<spread_in_layers>(calls);
  for (const SpreadHeads& c : calls) on_cuda<spread_heads>(c.kv, c.marked, c.rule, c.waits, c.due, c.stream);
}

void spread_heads(const PagedKv& kv, HeadFlags marked, const SpreadRule& rule, HeadFlags waits, HeadFlags due,
                  Stream s) {
  const char* op = "spread_heads";
  check_kv(kv, op, s);
  check_flags(kv, marked, "marked", op);
  check_flags(kv, waits, "waits", op);
  check_flags(kv, due, "due", op);
  if (rule.steps < 1 || !rule.places || !rule.counts)
    fail(Errc::internal, op,
         "got " + std::to_string(rule.steps) +
             " steps, or no places or counts, wanted at least 1, [kv_head] and [slot]");
  if (s.device() == Device::cuda) {
    if (!join_call(SpreadHeads{kv, marked, rule, waits, due, s}))
      on_cuda<spread_heads>(kv, marked, rule, waits, due, s);
    return;
  }
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const std::int32_t slot = kv.slots[r];
      spread_head(rule, marked(slot, h) != 0, rule.counts[slot], rule.places[h], waits(slot, h), due(slot, h));
    }
}

void forget_waiting(const PagedKv& kv, HeadFlags waits, Stream s) {
  const char* op = "forget_waiting";
  check_kv(kv, op, s);
  check_flags(kv, waits, "waits", op);
  if (s.device() == Device::cuda) return on_cuda<forget_waiting>(kv, waits, s);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) waits(kv.slots[r], h) = 0;
}

}  // namespace kvlab::ops
