#include <kvlab/ops.hpp>

#include <algorithm>
#include <vector>

#include "base/device_op.hpp"
#include "base/joined_calls.hpp"
#include "ops/page/check.hpp"
#include "ops/score/logits.hpp"
#include "ops/select/drifted.hpp"
#include "ops/select/select.hpp"

namespace kvlab::ops {
namespace {

// Of a list, the tokens that are not among as many best of n scores.
int missed_of(const float* scores, int n, const IndexList& lists, std::int64_t at, int head) {
  thread_local std::vector<std::uint64_t> keys;
  thread_local std::vector<char> listed;
  const int count = lists.count(at, head), best = std::min(count, n);
  keys.clear();
  for (int t = 0; t < n; ++t) keys.push_back(selection_key(scores[t], static_cast<std::uint32_t>(t)));
  select_greatest(keys.data(), keys.size(), static_cast<std::size_t>(best));
  listed.assign(static_cast<std::size_t>(n), 0);
  for (int i = 0; i < count; ++i)
    if (lists.index(at, head, i) < n) listed[static_cast<std::size_t>(lists.index(at, head, i))] = 1;
  int both = 0;
  for (int i = 0; i < best; ++i) both += listed[selection_index(keys[static_cast<std::size_t>(i)])];
  return count - both;
}

void check_watch(const PagedKv& kv, const DriftWatch& watch, int window, const char* op) {
  if (window < 1 || window > most_overlaps)
    fail(Errc::unsupported, op,
         "got a window of " + std::to_string(window) + " steps, wanted 1 to " + std::to_string(most_overlaps));
  if (watch.missed.extent[1] < kv.kv_heads || watch.missed.extent[2] < window || watch.missed.stride[2] != 1 ||
      watch.rests.extent[1] < kv.kv_heads)
    fail(Errc::internal, op, "got too few numbers, wanted [slot, kv_head, i] and [slot, kv_head]");
}

InjectedDrift injected_drift(const PagedKv& kv) {
  if (!kv.injected || !kv.injected->drift) return {};
  kv.injected->used->drift = true;
  return *kv.injected->drift;
}

void check_drift(const DriftedHeads& c, const char* op) {
  const PagedKv& kv = c.kv;
  check_kv(kv, op, c.stream);
  check_kv_scores(kv, c.scores, "scores", op, c.stream);
  check_list(kv, c.lists, op);
  check_watch(kv, c.watch, c.rule.window, op);
  if (c.drifted.extent[1] < kv.kv_heads || !c.leaders || !c.rule.steps || c.rule.period < 1)
    fail(Errc::internal, op, "got too few flags, no leaders or no steps, wanted [slot, kv_head], [kv_head] and [slot]");
}

}  // namespace

void DriftedHeads::run(const std::vector<DriftedHeads>& calls) {
  if (!cuda_reach_from_host()) return only_on_cuda<drifted_in_layers>(calls);
  for (const DriftedHeads& c : calls) {
    InjectedUse used;
    const Injected injected{.used = &used, .drift = &c.injected};  // what the call's cache points to may be gone
    PagedKv kv = c.kv;
    kv.injected = c.injected.sequence ? &injected : nullptr;
    if (c.logits.out.data)
      on_cuda<drifted_by_logits>(kv, c.logits, c.pooling, c.written_scores(), c.lists, c.rule, c.leaders, c.watch,
                                 c.drifted, c.stream);
    else
      on_cuda<drifted_heads>(kv, c.scores, c.lists, c.rule, c.leaders, c.watch, c.drifted, c.stream);
  }
}

void drifted_by_logits(const PagedKv& kv, const HeadLogits& logits, const VotePooling& pooling, Scores scores,
                       const TokenList& lists, const DriftRule& rule, const std::int32_t* leaders,
                       const DriftWatch& watch, HeadFlags drifted, Stream s) {
  if (s.device() == Device::cuda) {
    const char* op = "drifted_by_logits";
    check_logits(kv, logits, pooling, scores, op, s);
    check_drift({kv, scores, lists, rule, leaders, watch, drifted, s}, op);
    if (!join_call(
            DriftedHeads{kv, scores, lists, rule, leaders, watch, drifted, s, logits, pooling, injected_drift(kv)}))
      on_cuda<drifted_by_logits>(kv, logits, pooling, scores, lists, rule, leaders, watch, drifted, s);
    return;
  }
  pooled_logits(kv, logits, pooling, scores, s);
  drifted_heads(kv, scores, lists, rule, leaders, watch, drifted, s);
}

void drifted_heads(const PagedKv& kv, View<const float, 3> scores, const TokenList& lists, const DriftRule& rule,
                   const std::int32_t* leaders, const DriftWatch& watch, HeadFlags drifted, Stream s) {
  check_drift({kv, scores, lists, rule, leaders, watch, drifted, s}, "drifted_heads");
  if (s.device() == Device::cuda) {
    if (!join_call(DriftedHeads{kv, scores, lists, rule, leaders, watch, drifted, s, {}, {}, injected_drift(kv)}))
      on_cuda<drifted_heads>(kv, scores, lists, rule, leaders, watch, drifted, s);
    return;
  }
  const InjectedDrift injected = injected_drift(kv);
  for (int r = 0; r < kv.rows; ++r) {
    const int slot = kv.slots[r], left = steps_to_check(rule, rule.steps[slot]);
    std::vector<char> moved(static_cast<std::size_t>(kv.kv_heads), 0);
#pragma omp parallel for schedule(dynamic) if (worth_threads(std::int64_t{kv.kv_heads} * longest(kv)))
    for (int h = 0; h < kv.kv_heads; ++h) {
      const std::int64_t at = lists.at(r);
      if (leaders[h] != h || lists.count(at, h) == 0) continue;
      const bool scored = !watch.rests(slot, h) && step_counts(rule, left);
      const int now = scored ? missed_of(&scores(r, h, 0), kv.tokens(r, h), lists, at, h) : -1;
      const Watched w = watch_step(rule, &watch.missed(slot, h, 0), lists.count(at, h), now, left,
                                   injected_checks(injected, slot, h, rule.steps[slot]));
      moved[static_cast<std::size_t>(h)] = w.drifted;
      watch.rests(slot, h) = w.rests;
    }
    for (int h = 0; h < kv.kv_heads; ++h)
      drifted(slot, h) = leaders[h] >= 0 && moved[static_cast<std::size_t>(leaders[h])];
  }
}

void forget_overlaps(const PagedKv& kv, const DriftWatch& watch, Stream s) {
  const char* op = "forget_overlaps";
  check_kv(kv, op, s);
  check_watch(kv, watch, static_cast<int>(watch.missed.extent[2]), op);
  if (s.device() == Device::cuda) return on_cuda<forget_overlaps>(kv, watch, s);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      std::fill_n(&watch.missed(kv.slots[r], h, 0), watch.missed.extent[2], 0.f);
      watch.rests(kv.slots[r], h) = 0;
    }
}

}  // namespace kvlab::ops
