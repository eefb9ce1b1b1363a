// CpuStore changes keys or values in place.
#include <algorithm>

#include "ops/page/paged.hpp"
#include "store/cpu_store.hpp"

namespace kvlab {

// Returns how many tokens changed.
int CpuStore::rewrite_page(const Edit& e, int row, int slot, int head, int page) {
  const int first = page * options_.shape.page_size;
  const int end = std::min(first + options_.shape.page_size, length(e.layer, slot, head));
  int changed = 0;
  for (int t = first; t < end; ++t) {
    const Place to = place(e.layer, slot, head, t);
    changed += ops::write_row(to.frame, *to.layout, e.side, to.offset, &e.rows(row, head, t, 0));
  }
  if (changed > 0) outdated(e.layer, slot, head, page);
  return changed;
}

Applied CpuStore::rewrite_rows(const Edit& e, const std::vector<std::int32_t>& slots) {
  const int p = options_.shape.page_size, heads = options_.shape.kv_heads, rows = static_cast<int>(slots.size());
  const auto pages_of = [&](int slot, int head) { return (length(e.layer, slot, head) + p - 1) / p; };
  for (const int slot : slots)
    for (int head = 0; head < heads; ++head)
      for (int page = 0; page < pages_of(slot, head); ++page)
        if (entries(Tier::device, e.layer, slot, head)[page].frame == null_frame)
          bad(e, "got a rewrite with page " + std::to_string(page) + " on the host, wanted every page on the device");
  Applied done;
  for (int row = 0; row < rows; ++row)
    for (int head = 0; head < heads; ++head) {
      const int slot = slots[static_cast<std::size_t>(row)];
      for (int page = 0; page < pages_of(slot, head); ++page) done.changed += rewrite_page(e, row, slot, head, page);
    }
  return done;
}

}  // namespace kvlab
