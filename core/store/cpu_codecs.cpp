// CpuStore stores tokens in the codecs of a policy. Pages that are not of the first codec come first.
#include <kvlab/error.hpp>

#include <algorithm>
#include <cstring>

#include "ops/page/paged.hpp"
#include "store/cpu_store.hpp"

namespace kvlab {

void CpuStore::swap_pages(int layer, int slot, int head, int a, int b) {
  if (a == b) return;
  for (const Tier tier : {Tier::device, Tier::host}) {
    PageEntry* table = entries(tier, layer, slot, head);
    std::swap(table[a], table[b]);
  }
  std::byte* summary = summary_at(layer, slot, head, a);
  std::swap_ranges(summary, summary + summary_bytes_, summary_at(layer, slot, head, b));
}

// Stores a full page in another codec, and brings it to the end of the pages that have it.
Fit CpuStore::encode_page(int layer, int slot, int head, int page, int codec) {
  PageEntry& d = entries(Tier::device, layer, slot, head)[page];
  PageEntry fresh;
  if (!take(Tier::device, fresh, codec)) return Fit::out_of_memory;
  const PageLayout &from = layout(Tier::device, d), &to = layout(Tier::device, fresh);
  ops::copy_page(device_.at(d.frame), from, device_.at(fresh.frame), to);
  fresh.tokens = d.tokens;
  const bool crosses = (d.codec > 0) != (codec > 0);
  give_back(Tier::device, d);
  d = fresh;
  outdated(layer, slot, head, page);
  std::int32_t& lower = lower_pages_[head_index(layer, slot, head)];
  if (crosses) swap_pages(layer, slot, head, page, codec > 0 ? lower++ : --lower);
  return Fit::ok;
}

Applied CpuStore::encode_pages(const Edit& e, int slot, int head, std::span<const std::int32_t> list) {
  Applied done;
  const int p = options_.shape.page_size, n = length(e.layer, slot, head);
  const std::int32_t& lower = lower_pages_[head_index(e.layer, slot, head)];
  // Pages that change places are never on the list behind the one that does.
  for (std::size_t i = 0; i < list.size() && done.fit == Fit::ok; ++i) {
    const int page = e.codec > 0 ? list[i] : list[list.size() - 1 - i];
    const PageEntry& d = entries(Tier::device, e.layer, slot, head)[page];
    if (d.frame == null_frame) bad(e, "got an encode of a page that is not on the device");
    if (d.codec == e.codec || d.tokens < p || (e.codec == 0 && lower * p > n)) continue;
    done += {encode_page(e.layer, slot, head, page, e.codec), 1};
  }
  return done;
}

Applied CpuStore::store_levels(const Edit& e, const std::vector<std::int32_t>& slots) {
  Applied done;
  for (std::size_t row = 0; row < slots.size() && done.fit == Fit::ok; ++row)
    for (int head = 0; head < options_.shape.kv_heads && done.fit == Fit::ok; ++head) {
      const int n = length(e.layer, slots[row], head);
      if (e.levels.extent[2] < n)
        bad(e, "got levels of " + std::to_string(e.levels.extent[2]) + " tokens, wanted " + std::to_string(n));
      const std::uint8_t* levels = n > 0 ? &e.levels(static_cast<std::int64_t>(row), head, 0) : nullptr;
      for (int t = 0; t < n; ++t)
        if (levels[t] != level_gone && levels[t] >= layouts_.size())
          bad(e, "got level " + std::to_string(levels[t]) + ", wanted a codec that the policy declares, or 255");
      done += store_head(e.layer, slots[row], head, levels);
    }
  return done;
}

// Writes the head's tokens to fresh pages, then gives its old ones back.
Applied CpuStore::store_head(int layer, int slot, int head, const std::uint8_t* levels) {
  const int p = options_.shape.page_size, n = length(layer, slot, head);
  std::int32_t& lower = lower_pages_[head_index(layer, slot, head)];
  const int low = static_cast<int>(std::count(levels, levels + n, std::uint8_t{1})) / p * p;
  std::vector<std::int32_t> order;  // by new place
  for (int t = 0; t < n && static_cast<int>(order.size()) < low; ++t)
    if (levels[t] == 1) order.push_back(t);
  const int last_low = low > 0 ? order.back() : -1;
  for (int t = 0; t < n; ++t)
    if (levels[t] == 0 || (levels[t] == 1 && t > last_low)) order.push_back(t);
  const int kept = static_cast<int>(order.size()), pages = (kept + p - 1) / p, pages_before = (n + p - 1) / p;
  bool same = kept == n && low == lower * p;
  for (int i = 0; same && i < kept; ++i) same = order[static_cast<std::size_t>(i)] == i;
  if (same) return {};

  std::vector<PageEntry> fresh(static_cast<std::size_t>(pages));
  for (int page = 0; page < pages; ++page)
    if (!take(Tier::device, fresh[static_cast<std::size_t>(page)], page * p < low)) {
      for (PageEntry& e : fresh) give_back(Tier::device, e);
      return {Fit::out_of_memory, 0};
    }
  for (int i = 0; i < kept; ++i) {
    PageEntry& e = fresh[static_cast<std::size_t>(i / p)];
    const Place from = place(layer, slot, head, order[static_cast<std::size_t>(i)]);
    ops::copy_token(from.frame, *from.layout, from.offset, device_.at(e.frame), layout(Tier::device, e), i % p);
    ++e.tokens;
  }
  PageEntry* device = entries(Tier::device, layer, slot, head);
  for (int page = 0; page < pages_before; ++page) {
    give_back(Tier::device, device[page]);
    give_back(Tier::host, entries(Tier::host, layer, slot, head)[page]);
  }
  std::copy(fresh.begin(), fresh.end(), device);
  lengths_[head_index(layer, slot, head)] = kept;
  lower = low / p;
  if (options_.summary != Summary::none)
    ledger_.hold(Tier::device, Tag::summaries, std::int64_t{pages - pages_before} * summary_bytes_);
  for (int page = 0; page < pages; ++page) summarize(layer, slot, head, page);
  return {Fit::ok, std::max(1, n - kept)};
}

}  // namespace kvlab
