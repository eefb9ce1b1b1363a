// A choice of pages for the next step that attention's launch may make.
#pragma once
#include <kvlab/ops.hpp>

namespace kvlab::ops {

// Promises that `observe` of this layer and step chooses pages with `others` into `out`. `select` calls this right
// behind the choice for this step's attention. Both have the same queries, budgets, list and settings. That one is for
// the heads that turned_heads flags, and `others` for those that it does not flag, or the other way round.
// A GPU may then make both in the launch of attention. choose_pages of `observe` does nothing there, and its scores are
// not made. On the CPU, and where attention cannot, `observe` makes the choice.
void promise_choice(const PageChoice& others, const PageList& out);

}  // namespace kvlab::ops
