// CpuStore keeps copies of heads on the host and fetches tokens of them.
#include <algorithm>
#include <cstring>

#include "ops/page/paged.hpp"
#include "store/cpu_store.hpp"

namespace kvlab {

bool CpuStore::take_archive(int layer, int slot, int head, int tokens) {
  const int p = options_.shape.page_size;
  PageEntry* pages = archive_entries(layer, slot, head);
  archived_[head_index(layer, slot, head)] = tokens;
  for (int page = 0; page * p < tokens; ++page) {
    if (!take(Tier::host, pages[page], 0)) {
      free_archive(layer, slot, head);
      return false;
    }
    pages[page].tokens = static_cast<std::uint16_t>(std::min(p, tokens - page * p));
  }
  return true;
}

void CpuStore::free_archive(int layer, int slot, int head) {
  if (archive_.empty()) return;
  PageEntry* pages = archive_entries(layer, slot, head);
  for (int page = 0; page * options_.shape.page_size < archived(layer, slot, head); ++page)
    give_back(Tier::host, pages[page]);
  archived_[head_index(layer, slot, head)] = 0;
}

Fit CpuStore::archive_head(int layer, int slot, int head) {
  free_archive(layer, slot, head);
  const int n = length(layer, slot, head);
  if (!take_archive(layer, slot, head, n)) return Fit::out_of_memory;
  const PageEntry *from = entries(Tier::device, layer, slot, head), *to = archive_entries(layer, slot, head);
  for (int page = 0; page * options_.shape.page_size < n; ++page) {
    std::memcpy(host_.at(to[page].frame), device_.at(from[page].frame), static_cast<std::size_t>(host_layout_.bytes));
    count_arrival(Tier::host, host_layout_);
  }
  return Fit::ok;
}

// An edit that only writes copies counts nothing as changed.
Applied CpuStore::archive_heads(const Edit& e, const std::vector<std::int32_t>& slots) {
  for (const int slot : slots)
    for (int head = 0; head < options_.shape.kv_heads; ++head)
      if (e.heads.on(slot, head) && archive_head(e.layer, slot, head) != Fit::ok) return {Fit::out_of_memory, 0};
  return {};
}

Applied CpuStore::fetch_tokens(const Edit& e, const std::vector<std::int32_t>& slots) {
  const int p = options_.shape.page_size;
  Applied done;
  for (std::size_t row = 0; row < slots.size(); ++row)
    for (int head = 0; head < options_.shape.kv_heads; ++head) {
      const int slot = slots[row];
      if (!e.heads.on(slot, head)) continue;
      const auto r = e.list.at(static_cast<std::int64_t>(row));
      const int count = e.list.count(r, head), room = length(e.layer, slot, head),
                archive = archived(e.layer, slot, head);
      if (count > room)
        bad(e, "got " + std::to_string(count) + " tokens to fetch, wanted at most the " + std::to_string(room) +
                   " that the head holds");
      for (int i = 0; i < count; ++i) {
        const std::int32_t place = e.list.index(r, head, i);
        if (place < 0 || place >= archive)
          bad(e, "got place " + std::to_string(place) + " to fetch, wanted less than the archive's length " +
                     std::to_string(archive));
        if (i > 0 && place <= e.list.index(r, head, i - 1)) bad(e, "got a list that does not ascend");
      }
      const PageEntry* from = archive_entries(e.layer, slot, head);
      for (int i = 0; i < count; ++i) {
        const std::int32_t at = e.list.index(r, head, i);
        const Place to = place(e.layer, slot, head, i);
        ops::copy_token(host_.at(from[at / p].frame), host_layout_, at % p, to.frame, *to.layout, to.offset);
      }
      count_fetched(host_layout_, count);
      done.changed += count;
    }
  return done;
}

}  // namespace kvlab
