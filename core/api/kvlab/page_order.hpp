// Which pages are of the least use on the device, kept from step to step: for Placing::order beside a list that lasts.
// ops.hpp says what holds for every op.
#pragma once
#include <cstdint>
#include <vector>

#include "kvlab/kv.hpp"
#include "kvlab/ops.hpp"
#include "kvlab/policy.hpp"
#include "kvlab/step_numbers.hpp"
#include "kvlab/stream.hpp"
#include "kvlab/workspace.hpp"

namespace kvlab {

// A number of each page: [slot, kv_head, page] of a layer, with room for every page. Take it in attach. Core saves,
// restores and clears it with the sequence. Write it before the first place edit that has it: of equal numbers the
// newest page leaves first. It takes 4 bytes a page of device memory.
class KeptPageOrder {
 public:
  KeptPageOrder() = default;
  KeptPageOrder(const char* tag, const Shape& s, Workspace& w) : numbers_(tag, s, s.max_pages(), w) {}
  View<float, 3> of(const LayerKv& kv) const { return numbers_.of(kv); }

 private:
  KeptSeries numbers_;
};

namespace ops {

// order[slot, kv_head, page] = scores(row, kv_head, page) for the pages of the heads that are on. Pages that hold one
// of the left out tokens, and those that are still to come, leave last, the oldest first: page p gets 2^127 (1 + p
// 2^-23). Other heads stay as they are. Scores are those that score_pages leaves, with the same left out tokens.
// scores: [row, kv_head, page], with every page that is no exception. order: [slot, kv_head, page]. Bytes: scores, and
// order.
void keep_page_scores(const PagedKv& kv, View<const float, 3> scores, const Pins& left_out, const Heads& heads,
                      View<float, 3> order, Stream s);

}  // namespace ops

// Ranks pages anew while sequences decode: each by the query of every 32nd of its steps. Without it the order is that
// of the prompt's end. Steps in which no sequence is due do nothing: due ones are a kind of their own. A policy with
// PreparesSteps calls it so:
//   prepare_step: renewal_.prepare(c)    step_variant: return renewal_.due()    observe: renewal_.renew(...)
class PageOrderRenewal {
 public:
  static constexpr int every = 32;  // decode steps of a sequence

  PageOrderRenewal() = default;
  // Takes memory in attach.
  PageOrderRenewal(const Shape& s, Workspace& w)
      : slots_(s.max_slots), due_("sequences whose pages are ranked anew", s.max_slots, w) {}

  void prepare(const StepCounters& c) {
    std::vector<std::uint8_t>& due = due_.fresh();
    due.assign(static_cast<std::size_t>(slots_), 0);
    any_ = false;
    for (int row = 0; row < c.rows; ++row) {
      if ((c.step[row] + 1) % every != 0) continue;
      due[static_cast<std::size_t>(c.slots[row])] = 1;
      any_ = true;
    }
    if (any_) due_.put(c);
  }
  bool due() const { return any_; }  // whether a sequence of the step is

  // choice: that of the policy's lists. Bytes in a step that is due: the summaries of the due sequences' pages.
  void renew(const LayerStep& step, const PageChoice& choice, const KeptPageOrder& order, Stream s) const {
    if (!any_) return;
    const Heads heads = Heads::flagged({due_.data(), {slots_, step.kv_heads()}, {1, 0}});
    const PageList best = step.list<PageList>("best page", 1);
    const Scores scores =
        ops::choose_pages(step, step.queries, choice.among(heads), ops::PageCounts{.same = 1, .each = {}}, best, s);
    ops::keep_page_scores(step.pages, scores, choice.leave_out, heads, order.of(step), s);
  }

 private:
  int slots_ = 0;
  bool any_ = false;
  StepNumbers<std::uint8_t> due_;  // [slot]
};

}  // namespace kvlab
