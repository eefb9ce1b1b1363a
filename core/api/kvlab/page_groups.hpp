// Groups of neighbouring pages, chosen by the best page of each. A cache of small pages then has scores as fine as its
// pages, and its lists are of whole groups. ops.hpp says what holds for every op.
#pragma once
#include <cstdint>

#include "kvlab/kv.hpp"
#include "kvlab/ops.hpp"
#include "kvlab/policy.hpp"
#include "kvlab/stream.hpp"

namespace kvlab {

// How ops::group_pages chooses. Group g of a head is its pages g * parts to (g + 1) * parts - 1. The last one may have
// fewer.
struct GroupChoice {
  int parts = 1;                       // pages of a group, at least 1
  const std::int32_t* most = nullptr;  // [kv_head] groups of a head: HeadConstants
  bool newest_group = false;           // the last group takes one of these places
  int whole = 0;                       // a head of at most so many tokens gets all of its pages
  Heads heads;                         // lists of the others stay as they are
};

namespace ops {

// list = the pages of the most(kv_head) best groups, ascending. The score of a group is that of its best page. NaN
// ranks below all others, so a group is NaN where all of its pages are. It reads no score of a head that gets all of
// its pages. page_scores: [row, kv_head, page], as ops::page_score gives them. list has room for all pages that it
// gets. On a GPU a head may have as many groups as fit shared memory, at least 16384: else Errc::unsupported. LServe
// (Yang et al. 2025). Bytes: the scores, and the list.
void group_pages(const PagedKv& kv, View<const float, 3> page_scores, const GroupChoice& choice, PageList list,
                 Stream s);

// begins[slot, kv_head] = 1 where the head holds another number of begun periods than at the last call, else 0, for the
// slots of kv's rows. A period is so many tokens by place. So with period 4 the tokens 1, 5, 9 begin one. Numbers
// start at 0, so the first call with a token begins one in any case. period is at least 1. `last` is of one layer. It
// reads no page. Bytes: a few for each head.
void begun_periods(const PagedKv& kv, int period, HeadNumbers last, HeadFlags begins, Stream s);

// page_score and group_pages of a callback's layer, for `scored` heads alone. The other heads that the choice names
// must get all of their pages, whatever their scores. An experiment cannot replace these lists (`inject`).
inline void choose_page_groups(const LayerKv& kv, const Tensor<3>& queries, PageChoice rule, const Heads& scored,
                               const GroupChoice& choice, PageList list, Stream s) {
  const int pages = (kv.max_length + kv.pages.page_size - 1) / kv.pages.page_size;
  const auto scores = kv.scratch<float>("page score", {kv.rows(), kv.kv_heads(), pages});
  PagedKv of_pages = kv.pages;
  of_pages.injected = nullptr;
  rule.budget = 0, rule.budgets = {}, rule.newest_page = false;
  score_pages(queries, of_pages, kv.summaries, rule.among(scored), scores, kv.list<PageList>("no page", 1), s);
  group_pages(kv.pages, scores, choice, list, s);
}

}  // namespace ops
}  // namespace kvlab
