// CpuStore changes keys or values in place.
#include <algorithm>

#include "ops/page/paged.hpp"
#include "store/cpu_store.hpp"

namespace kvlab {

// Returns how many tokens changed.
int CpuStore::rewrite_page(const Edit& e, int row, int slot, int head, int page) {
  const int first = page * options_.shape.page_size, n = length(e.layer, slot, head);
  const int begin = e.range.begin(row, head, n);
  const int end = std::min(first + options_.shape.page_size, e.range.end(row, head, n));
  int changed = 0;
  for (int t = std::max(first, begin); t < end; ++t) {
    const Place to = place(e.layer, slot, head, t);
    changed += ops::write_row(to.frame, *to.layout, e.side, to.offset, &e.rows(row, head, t - begin, 0));
  }
  if (changed > 0) outdated(e.layer, slot, head, page);
  return changed;
}

Applied CpuStore::rewrite_rows(const Edit& e, const std::vector<std::int32_t>& slots) {
  const int p = options_.shape.page_size, heads = options_.shape.kv_heads, rows = static_cast<int>(slots.size());
  // Calls visit(row, slot, head, page) for the pages of the range.
  const auto for_pages = [&](const auto& visit) {
    for (int row = 0; row < rows; ++row)
      for (int head = 0; head < heads; ++head) {
        const int slot = slots[static_cast<std::size_t>(row)], n = length(e.layer, slot, head);
        const int begin = e.range.begin(row, head, n), end = e.range.end(row, head, n);
        for (int page = begin / p; begin < end && page * p < end; ++page) visit(row, slot, head, page);
      }
  };
  for_pages([&](int, int slot, int head, int page) {
    if (entries(Tier::device, e.layer, slot, head)[page].frame == null_frame)
      bad(e, "got a rewrite with page " + std::to_string(page) + " on the host, wanted every page on the device");
  });
  Applied done;
  for_pages([&](int row, int slot, int head, int page) { done.changed += rewrite_page(e, row, slot, head, page); });
  return done;
}

}  // namespace kvlab
