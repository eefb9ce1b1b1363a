// References of kvlab/page_groups.hpp.
#pragma once
#include <kvlab/page_groups.hpp>

namespace kvlab::ops {

void group_pages_reference(const PagedKv& kv, View<const float, 3> page_scores, const GroupChoice& choice,
                           PageList list);
void begun_periods_reference(const PagedKv& kv, int period, HeadNumbers last, HeadFlags begins);

}  // namespace kvlab::ops
