// The references of this folder (see ops/page/reference.hpp).
#pragma once
#include <kvlab/kinds.hpp>
#include <kvlab/kv.hpp>
#include <kvlab/ops.hpp>
#include <kvlab/roles.hpp>

#include <cstdint>
#include <vector>

namespace kvlab::ops {

void top_tokens_reference(const PagedKv& kv, View<const float, 3> scores, View<const std::int32_t, 2> keep,
                          const Pins* pins, TokenList list);
void top_tokens_reference(const PagedKv& kv, View<const float, 3> scores, const TokenChoice& choice, TokenList list);
// The overlap that drifted_heads finds by these scores; NaN for an empty list.
float overlap_reference(const PagedKv& kv, View<const float, 3> scores, const TokenList& lists, int row, int head);
void top_pages_reference(const PagedKv& kv, View<const float, 3> page_scores, View<const std::int32_t, 2> page_budgets,
                         Pins pins, PageList out);
void set_pinned_reference(const PagedKv& kv, Pins pins, float value, Scores scores);
void set_listed_reference(const TokenList& list, float value, Scores scores);
void head_sum_reference(const PagedKv& kv, View<const float, 3> in, Pins leave_out, View<float, 2> out);
void tokens_of_share_reference(const PagedKv& kv, View<const float, 3> scores, float share, Pins leave_out,
                               View<float, 2> out);
void top_p_tokens_reference(const PagedKv& kv, View<const float, 3> weights, float p, Pins pins, TokenList list);
void keep_by_class_reference(const PagedKv& kv, const TextTokens& text, View<const float, 3> scores,
                             const ClassNumbers& classes, View<const KeepRule, 2> rules, Scores kept,
                             View<std::int32_t, 2> counts);
void fold_surplus_reference(const PagedKv& kv, const Surplus& surplus, int i, const MadeUpTokens& to);
void allot_uniform_reference(const Allotment& a);
void allot_tokens_reference(const Allotment& a, const std::int32_t* tokens);
void allot_by_score_reference(const Allotment& a, double floor, bool exact_total);
void round_allotment_reference(View<const std::int32_t, 2> length, const std::uint8_t* keep_all, int page_size,
                               View<std::int32_t, 2> keep);

void lengths_reference(const PagedKv& kv, View<std::int32_t, 2> out);
void older_pages_reference(View<const std::int32_t, 2> tokens, const std::uint8_t* rows, int page_size, int newest,
                           PageList out);
void aged_pages_reference(const PagedKv& kv, View<const std::int32_t, 2> tokens, int residual, PageList out);

void levels_reference(const PagedKv& kv, View<const float, 3> sums, const std::int32_t* seen, const LevelRule& rule,
                      View<std::uint8_t, 3> out, const LevelNumbers& numbers);
void demote_reference(const StateColumn& sums, const LevelRule& rule, const LevelNumbers& numbers, const Demotion& to);

}  // namespace kvlab::ops
