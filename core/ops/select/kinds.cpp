#include <kvlab/kinds.hpp>

#include <algorithm>
#include <string>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/page/paged.hpp"
#include "ops/select/select.hpp"

namespace kvlab::ops {
namespace {

struct Scratch {
  std::vector<std::int32_t> position;
  std::vector<std::uint64_t> keys;  // of the tokens that compete for KeepRule::best
};

// Marks the tokens of one head. Returns their number.
std::int32_t keep_of_head(const KeepRule& rule, const TextTokens& text, int slot, int tokens, const float* score,
                          Scratch& x, float* kept) {
  x.keys.clear();
  for (int t = 0; t < tokens; ++t) {
    const std::int32_t p = x.position[static_cast<std::size_t>(t)];
    const bool sure = p < rule.first || (rule.kinds & kind_bit(text.kind(slot, p)));
    if (!sure) x.keys.push_back(selection_key(score[t], static_cast<std::uint32_t>(t)));
    kept[t] = sure || p >= rule.from ? 1.f : 0.f;
  }
  const std::size_t best = std::min(x.keys.size(), static_cast<std::size_t>(std::max(rule.best, 0)));
  select_greatest(x.keys.data(), x.keys.size(), best);
  for (std::size_t i = 0; i < best; ++i) kept[selection_index(x.keys[i])] = 1;
  return static_cast<std::int32_t>(std::count(kept, kept + tokens, 1.f));
}

}  // namespace

void keep_by_class(const PagedKv& kv, const TextTokens& text, View<const float, 3> scores, const ClassNumbers& classes,
                   View<const KeepRule, 2> rules, Scores kept, View<std::int32_t, 2> counts, Stream s) {
  const char* op = "keep_by_class";
  check_kv(kv, op, s);
  check_kv_scores(kv, scores, "scores", op, s);
  check_kv_scores(kv, kept, "kept", op, s);
  if (!text.ids) fail(Errc::internal, op, "got no text, wanted needs() to ask for token ids");
  if (counts.extent[0] < kv.rows || counts.extent[1] < kv.kv_heads)
    fail(Errc::internal, op, "got counts of another shape, wanted [row, kv_head]");
  if (classes.of && classes.of.extent[1] < kv.kv_heads)
    fail(Errc::internal, op, "got numbers of another shape, wanted [slot, kv_head, i]");
  if (rules.extent[0] < kv.rows || rules.extent[1] < classes.classes())
    fail(Errc::internal, op,
         "got " + std::to_string(rules.extent[1]) + " rules of a row, wanted one for each of " +
             std::to_string(classes.classes()) + " classes");
  if (s.device() == Device::cuda) return on_cuda<keep_by_class>(kv, text, scores, classes, rules, kept, counts, s);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) check_resident(kv, r, h, op);
#pragma omp parallel for collapse(2) \
    schedule(dynamic) if (worth_threads(std::int64_t{longest(kv)} * kv.rows * kv.kv_heads))
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      thread_local Scratch x;
      const int tokens = kv.tokens(r, h), slot = kv.slots[r];
      x.position.resize(static_cast<std::size_t>(tokens));
      token_positions(kv, r, h, tokens, x.position.data());
      counts(r, h) = tokens == 0 ? 0
                                 : keep_of_head(rules(r, classes.class_of(slot, h)), text, slot, tokens,
                                                &scores(r, h, 0), x, &kept(r, h, 0));
    }
}

}  // namespace kvlab::ops
