// How the store carries out edits.
#include <kvlab/error.hpp>

#include <algorithm>
#include <cstring>

#include "ops/page/paged.hpp"
#include "store/cpu_store.hpp"

namespace kvlab {
namespace {

// list[0 .. count) are ascending places below `limit`; one pass without branches.
bool ascends(const std::int32_t* list, int count, int limit) {
  if (count == 0) return true;
  int wrong = (list[0] < 0) | (list[count - 1] >= limit);
  for (int i = 1; i < count; ++i) wrong |= list[i] <= list[i - 1];
  return !wrong;
}

}  // namespace

void CpuStore::copy_page(int layer, int slot, int head, int page, Tier from, Tier to) {
  const PageEntry& a = entries(from, layer, slot, head)[page];
  PageEntry& b = entries(to, layer, slot, head)[page];
  const PageLayout &la = layout(from, a), &lb = layout(to, b);
  const std::byte* source = arena(from).at(a.frame);
  std::byte* target = arena(to).at(b.frame);
  if (la.bytes == lb.bytes && la.codec.k.bits == lb.codec.k.bits && la.codec.v.bits == lb.codec.v.bits) {
    std::memcpy(target, source, static_cast<std::size_t>(la.bytes));
  } else {
    for (int t = 0; t < a.tokens; ++t) ops::copy_token(source, la, t, target, lb, t);
  }
  b.tokens = a.tokens;
  ledger_.move(to, Tag::keys, lb.v - lb.k);
  ledger_.move(to, Tag::values, lb.k_meta - lb.v);
  ledger_.move(to, Tag::codec_metadata, lb.positions - lb.k_meta);
  const std::int64_t columns = std::int64_t{lb.state_columns} * lb.page_size * 4;
  ledger_.move(to, Tag::positions, lb.bytes - lb.positions - columns);
  ledger_.move(to, Tag::scores, columns);
}

// Policies write token state in device pages, so a copy of a page on the host has what it was when the page went there.
void CpuStore::copy_state_down(int layer, int slot, int head, int page) {
  const PageEntry &upper = entries(Tier::device, layer, slot, head)[page],
                  &lower = entries(Tier::host, layer, slot, head)[page];
  const PageLayout &from = layout(Tier::device, upper), &to = layout(Tier::host, lower);
  const std::int64_t bytes = std::int64_t{to.state_columns} * to.page_size * 4;
  if (bytes == 0) return;
  std::memcpy(host_.at(lower.frame) + to.state, device_.at(upper.frame) + from.state, static_cast<std::size_t>(bytes));
  ledger_.move(Tier::host, Tag::scores, bytes);
}

// The page's tokens have changed where they are: a lower copy of a device page is stale, and so is the summary.
void CpuStore::outdated(int layer, int slot, int head, int page) {
  if (entries(Tier::device, layer, slot, head)[page].frame != null_frame)
    give_back(Tier::host, entries(Tier::host, layer, slot, head)[page]);
  summarize(layer, slot, head, page);
}

void CpuStore::swap_tokens(int layer, int slot, int head, int a, int b) {
  const Place pa = place(layer, slot, head, a), pb = place(layer, slot, head, b);
  const PageLayout& l = *pa.layout;
  std::vector<std::byte> spare(static_cast<std::size_t>(l.bytes));
  ops::copy_token(pa.frame, l, pa.offset, spare.data(), l, 0);
  ops::copy_token(pb.frame, *pb.layout, pb.offset, pa.frame, l, pa.offset);
  ops::copy_token(spare.data(), l, 0, pb.frame, *pb.layout, pb.offset);
}

// Keeps the listed tokens (ascending places) and returns how many left. Few losses: the last tokens fill the holes, one
// copy each, and nothing else is looked at. Many: the kept ones move up and stay in order.
std::int64_t CpuStore::keep_only(int layer, int slot, int head, const std::int32_t* kept, int count) {
  const Shape& s = options_.shape;
  const int before = length(layer, slot, head);
  const int lost = before - count;
  if (lost <= 0) return 0;
  const int p = s.page_size, pages_before = (before + p - 1) / p, pages_after = (count + p - 1) / p;

  std::vector<std::int32_t> rank;
  if (options_.rope == RopeRegime::re_rotate && count > 0) {
    const std::vector<std::int32_t> slots{slot};
    rank.resize(static_cast<std::size_t>(before));
    ops::token_ranks(view(layer, slots), 0, head, before, rank.data());
  }

  auto& touched = touched_;  // pages, ascending
  touched.clear();
  const auto move_token = [&](int from, int to) {
    const Place a = place(layer, slot, head, from), b = place(layer, slot, head, to);
    ops::copy_token(a.frame, *a.layout, a.offset, b.frame, *b.layout, b.offset);
    if (!rank.empty()) rank[static_cast<std::size_t>(to)] = rank[static_cast<std::size_t>(from)];
    if (touched.empty() || touched.back() != to / p) touched.push_back(to / p);
  };
  constexpr int few = 8;
  if (lost <= few) {
    for (int hole = 0; hole < lost; ++hole) {
      // kept[i] - i, the holes before kept[i], ascends.
      const auto* after =
          std::partition_point(kept, kept + count, [&](const std::int32_t& t) { return t - (&t - kept) <= hole; });
      const int to = static_cast<int>(after - kept) + hole;
      if (to >= count) break;
      move_token(kept[count - 1 - hole], to);
    }
  } else {
    for (int i = 0; i < count; ++i)
      if (kept[i] != i) move_token(kept[i], i);
  }

  PageEntry* device = entries(Tier::device, layer, slot, head);
  PageEntry* host = entries(Tier::host, layer, slot, head);
  for (int page = pages_after; page < pages_before; ++page) {
    give_back(Tier::device, device[page]);
    give_back(Tier::host, host[page]);
  }
  lengths_[head_index(layer, slot, head)] = count;
  if (options_.summary != Summary::none)
    ledger_.hold(Tier::device, Tag::summaries, std::int64_t{pages_after - pages_before} * summary_bytes_);
  if (const int last = pages_after - 1; last >= 0 && std::min(before, pages_after * p) != count) {
    PageEntry& upper = device[last].frame != null_frame ? device[last] : host[last];
    upper.tokens = static_cast<std::uint16_t>(count - last * p);
    if (touched.empty() || touched.back() != last) touched.push_back(last);
  }
  for (const int page : touched) outdated(layer, slot, head, page);

  if (!rank.empty()) {
    const std::vector<std::int32_t> slots{slot};
    const PagedKv kv = view(layer, slots);
    std::vector<std::int32_t> delta(static_cast<std::size_t>(count));
    ops::token_ranks(kv, 0, head, count, delta.data());
    for (int i = 0; i < count; ++i) delta[static_cast<std::size_t>(i)] -= rank[static_cast<std::size_t>(i)];
    ops::re_rotate(kv, 0, head, count, delta.data());
    for (int page = 0; page < pages_after; ++page)
      if (std::any_of(delta.begin() + page * p, delta.begin() + std::min(count, (page + 1) * p),
                      [](std::int32_t d) { return d != 0; }))
        outdated(layer, slot, head, page);
  }
  return lost;
}

void CpuStore::check_list(const Edit& e, std::size_t rows) const {
  const Shape& s = options_.shape;
  const auto bad = [&](const std::string& what) {
    throw Error(Errc::plugin, "edit of layer " + std::to_string(e.layer) + ": " + what);
  };
  if (e.layer < 0 || e.layer >= s.layers) bad("got that layer, wanted 0 to " + std::to_string(s.layers - 1));
  const auto& index = e.list.index.extent;
  const auto& count = e.list.count.extent;
  const std::int64_t wanted = static_cast<std::int64_t>(rows);
  if (index[0] < wanted || count[0] < wanted || index[1] < s.kv_heads || count[1] < s.kv_heads)
    bad("got a list of fewer rows or heads than the callback has, wanted [row, kv_head]");
  for (std::int64_t row = 0; row < wanted; ++row)
    for (int head = 0; head < s.kv_heads; ++head)
      if (e.list.count(row, head) < 0 || e.list.count(row, head) > index[2])
        bad("got a count of " + std::to_string(e.list.count(row, head)) + ", wanted 0 to " + std::to_string(index[2]) +
            ", the list's room");
}

Applied CpuStore::apply(const std::vector<Edit>& edits, const std::vector<std::int32_t>& slots) {
  Applied total;
  for (const Edit& e : edits) {
    if (e.verb == Edit::attend || e.verb == Edit::attend_tokens) continue;
    check_list(e, slots.size());
    if (e.when.kind == Deadline::steps_from_now && e.when.steps > 0) {
      // Rows keep their own clocks, so each row waits on its own.
      for (std::size_t row = 0; row < slots.size(); ++row) {
        Pending p;
        p.edit = e;
        p.slots = {slots[row]};
        p.due = steps(slots[row]) + e.when.steps;
        const std::int64_t heads = options_.shape.kv_heads, room = e.list.index.extent[2];
        p.index.resize(static_cast<std::size_t>(heads * room));
        p.count.resize(static_cast<std::size_t>(heads));
        for (int h = 0; h < heads; ++h) {
          p.count[static_cast<std::size_t>(h)] = e.list.count(row, h);
          for (int i = 0; i < e.list.count(row, h); ++i)
            p.index[static_cast<std::size_t>(h * room + i)] = e.list.index(row, h, i);
        }
        p.edit.list.index = View<std::int32_t, 3>::dense(nullptr, {1, heads, room});
        p.edit.list.count = View<std::int32_t, 2>::dense(nullptr, {1, heads});
        p.edit.when = {};
        pending_.push_back(std::move(p));
      }
      continue;
    }
    const Applied one = apply_now(e, slots);
    total.changed += one.changed;
    fired_ += one.changed > 0;
    if (one.fit != Fit::ok) {
      total.fit = one.fit;
      break;
    }
  }
  return total;
}

Applied CpuStore::apply_now(const Edit& e, const std::vector<std::int32_t>& slots) {
  const Shape& s = options_.shape;
  Applied done;
  auto bad = [&](const std::string& what) {
    throw Error(Errc::plugin, "edit of layer " + std::to_string(e.layer) + ": " + what);
  };
  std::vector<std::int32_t> kept;
  for (int row = 0; row < static_cast<int>(slots.size()); ++row)
    for (int head = 0; head < s.kv_heads; ++head) {
      const int slot = slots[static_cast<std::size_t>(row)];
      const int n = length(e.layer, slot, head), pages = (n + s.page_size - 1) / s.page_size;
      const int count = e.list.count(row, head);
      const bool tokens = e.verb == Edit::evict || e.verb == Edit::evict_rest || e.verb == Edit::move;
      const int limit = tokens ? n : pages;
      const std::int32_t* list = &e.list.index(row, head, 0);
      const bool dense = e.list.index.stride[2] == 1;
      if (e.verb == Edit::move || !dense || !ascends(list, count, limit))
        for (int i = 0; i < count; ++i) {
          const int at = e.list.index(row, head, i);
          if (at < 0 || at >= limit)
            bad("got index " + std::to_string(at) + ", wanted 0 to " + std::to_string(limit - 1));
          if (i > 0 && e.verb != Edit::move && at <= e.list.index(row, head, i - 1))
            bad("got a list that does not ascend");
        }
      if (e.verb == Edit::evict || e.verb == Edit::evict_rest) {
        kept.clear();
        if (e.verb == Edit::evict_rest && dense) {
          done.changed += keep_only(e.layer, slot, head, list, count);
          continue;
        }
        if (e.verb == Edit::evict_rest) {
          for (int i = 0; i < count; ++i) kept.push_back(e.list.index(row, head, i));
        } else {
          for (int t = 0, i = 0; t < n; ++t)
            if (i < count && e.list.index(row, head, i) == t)
              ++i;
            else
              kept.push_back(t);
        }
        done.changed += keep_only(e.layer, slot, head, kept.data(), static_cast<int>(kept.size()));
        continue;
      }
      if (e.verb == Edit::move) {
        if (count % 2) bad("got an odd number of places in a move, wanted pairs");
        for (int i = 0; i < count; i += 2) {
          const int a = e.list.index(row, head, i), b = e.list.index(row, head, i + 1);
          if (a == b) continue;
          swap_tokens(e.layer, slot, head, a, b);
          for (int t : {a, b}) outdated(e.layer, slot, head, t / s.page_size);
          ++done.changed;
        }
        continue;
      }
      PageEntry* device = entries(Tier::device, e.layer, slot, head);
      PageEntry* host = entries(Tier::host, e.layer, slot, head);
      for (int i = 0; i < count; ++i) {
        const int page = e.list.index(row, head, i);
        PageEntry &d = device[page], &h = host[page];
        switch (e.verb) {
          case Edit::offload:
            if (h.frame != null_frame) break;  // a valid lower copy is never written again
            if (!take(Tier::host, h, 0)) return {Fit::out_of_memory, done.changed};
            copy_page(e.layer, slot, head, page, Tier::device, Tier::host);
            ++done.changed;
            break;
          case Edit::recall:
            if (d.frame != null_frame) break;
            if (!take(Tier::device, d, 0)) return {Fit::out_of_memory, done.changed};
            copy_page(e.layer, slot, head, page, Tier::host, Tier::device);
            ++done.changed;
            break;
          case Edit::drop: {
            if (e.tier == Tier::disk) bad("got a drop on the disk tier, wanted device or host");
            PageEntry &from = e.tier == Tier::host ? h : d, &other = e.tier == Tier::host ? d : h;
            if (from.frame == null_frame) break;
            if (other.frame == null_frame)
              bad("got a drop of page " + std::to_string(page) + "'s only copy, wanted an evict or an offload first");
            if (e.tier == Tier::device) copy_state_down(e.layer, slot, head, page);
            give_back(e.tier, from);
            ++done.changed;
            break;
          }
          case Edit::encode: {
            if (e.codec < 0 || e.codec >= static_cast<int>(layouts_.size()))
              bad("got codec " + std::to_string(e.codec) + ", wanted one that the policy declares");
            if (d.frame == null_frame) bad("got an encode of a page that is not on the device");
            if (d.codec == e.codec) break;
            PageEntry fresh;
            if (!take(Tier::device, fresh, e.codec)) return {Fit::out_of_memory, done.changed};
            const PageLayout &from = layout(Tier::device, d), &to = layout(Tier::device, fresh);
            for (int t = 0; t < d.tokens; ++t)
              ops::copy_token(device_.at(d.frame), from, t, device_.at(fresh.frame), to, t);
            fresh.tokens = d.tokens;
            give_back(Tier::device, d);
            d = fresh;
            outdated(e.layer, slot, head, page);
            ++done.changed;
            break;
          }
          default: bad("got an unknown verb");
        }
      }
    }
  return done;
}

Fit CpuStore::recall_all(int layer, int slot) {
  const std::vector<std::int32_t> slots{slot};
  const Shape& s = options_.shape;
  PageList up;
  const std::int64_t room = (max_length(layer, slots) + s.page_size - 1) / s.page_size;
  up.index = take_scratch<std::int32_t>(workspace_, "recall", {1, s.kv_heads, room});
  up.count = take_scratch<std::int32_t>(workspace_, "recall", {1, s.kv_heads});
  for (int head = 0; head < s.kv_heads; ++head) {
    const PageEntry* device = entries(Tier::device, layer, slot, head);
    int count = 0;
    for (int page = 0; page * s.page_size < length(layer, slot, head); ++page)
      if (device[page].frame == null_frame) up.index(0, head, count++) = page;
    up.count(0, head) = count;
  }
  Edits edits(layer);
  edits.recall(up);
  return apply(edits.all(), slots).fit;
}

IndexList CpuStore::resolve_attend(const Edit& e, const std::vector<std::int32_t>& slots, Workspace& w) {
  const Shape& s = options_.shape;
  check_list(e, slots.size());
  const int rows = static_cast<int>(slots.size());
  const bool of_pages = e.verb == Edit::attend;
  const int p = s.page_size, unit = of_pages ? p : 1;  // tokens of an entry
  const int room = std::max(1, (max_length(e.layer, slots) + unit - 1) / unit);
  IndexList out;
  out.index = take_scratch<std::int32_t>(w, "attend", {rows, s.kv_heads, room});
  out.count = take_scratch<std::int32_t>(w, "attend", {rows, s.kv_heads});
  std::vector<bool> chosen;
  bool all = true;
  for (int row = 0; row < rows; ++row)
    for (int head = 0; head < s.kv_heads; ++head) {
      const int n = length(e.layer, slots[static_cast<std::size_t>(row)], head), entries = (n + unit - 1) / unit;
      chosen.assign(static_cast<std::size_t>(entries), false);
      const auto choose = [&](int begin, int end) {
        for (int i = begin; i < end; ++i) chosen[static_cast<std::size_t>(i)] = true;
      };
      for (int i = 0; i < e.list.count(row, head); ++i) {
        const int entry = e.list.index(row, head, i);
        if (entry < 0 || entry >= entries)
          throw Error(Errc::plugin, std::string("attend list: got ") + (of_pages ? "page " : "token ") +
                                        std::to_string(entry) + ", wanted 0 to " + std::to_string(entries - 1));
        choose(entry, entry + 1);
      }
      choose(0, (std::clamp(e.pins.first, 0, n) + unit - 1) / unit);
      choose((n - std::clamp(e.pins.last, 0, n)) / unit, e.pins.last > 0 ? entries : 0);
      if (e.pins.newest_page) choose(std::max(0, n - 1) / p * p / unit, entries);
      int count = 0;
      for (int i = 0; i < entries; ++i)
        if (chosen[static_cast<std::size_t>(i)]) out.index(row, head, count++) = i;
      out.count(row, head) = count;
      all &= count == entries;
    }
  fired_ += !all;
  return out;
}

}  // namespace kvlab
