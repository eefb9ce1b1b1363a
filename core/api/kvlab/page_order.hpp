// Which pages are of the least use on the device, kept from step to step: for Placing::order beside a list that lasts.
// ops.hpp says what holds for every op.
#pragma once
#include "kvlab/kv.hpp"
#include "kvlab/policy.hpp"
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
}  // namespace kvlab
