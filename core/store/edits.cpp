// CpuStore carries out edits.
#include <kvlab/error.hpp>

#include <algorithm>
#include <cstring>
#include <span>

#include "base/over_rows.hpp"
#include "ops/page/packed.hpp"
#include "ops/page/paged.hpp"
#include "ops/score/key_factors.hpp"
#include "ops/score/verify.hpp"
#include "ops/select/select.hpp"
#include "store/cpu_store.hpp"

namespace kvlab {
namespace {

// Marks the entries of a head that a list or pins name. A head has n tokens, an entry `unit` of them, a page p.
void choose_listed(const Edit& e, int row, int head, int n, int unit, int p, const char* got,
                   std::vector<bool>& chosen) {
  const int entries = (n + unit - 1) / unit;
  chosen.assign(static_cast<std::size_t>(entries), false);
  const auto choose = [&](int begin, int end) {
    for (int i = begin; i < end; ++i) chosen[static_cast<std::size_t>(i)] = true;
  };
  const std::int64_t at = e.list.at(row);
  for (int i = 0; i < e.list.count(at, head); ++i) {
    const int entry = e.list.index(at, head, i);
    if (entry < 0 || entry >= entries)
      throw Error(Errc::plugin, got + std::to_string(entry) + ", wanted 0 to " + std::to_string(entries - 1));
    choose(entry, entry + 1);
  }
  choose(0, (std::clamp(e.pins.first, 0, n) + unit - 1) / unit);
  choose((n - std::clamp(e.pins.last, 0, n)) / unit, e.pins.last > 0 ? entries : 0);
  if (e.pins.newest_page) choose(std::max(0, n - 1) / p * p / unit, entries);
}

// Returns whether all places are in [0, limit) and, unless they are the pairs of a move, ascend.
bool valid(const Edit& e, std::span<const std::int32_t> list, int limit) {
  if (list.empty()) return true;
  if (e.verb == Edit::move)
    return std::all_of(list.begin(), list.end(), [&](std::int32_t at) { return at >= 0 && at < limit; });
  int wrong = int(list.front() < 0) | int(list.back() >= limit);  // one pass without branches
  for (std::size_t i = 1; i < list.size(); ++i) wrong |= list[i] <= list[i - 1];
  return !wrong;
}

}  // namespace

void CpuStore::copy_page(int layer, int slot, int head, int page, Tier from, Tier to) {
  const PageEntry& a = entries(from, layer, slot, head)[page];
  PageEntry& b = entries(to, layer, slot, head)[page];
  const PageLayout &la = layout(from, a), &lb = layout(to, b);
  const std::byte* source = arena(from).at(a.frame);
  std::byte* target = arena(to).at(b.frame);
  b.packed = 0;
  if (to == Tier::host && packs() && a.tokens == options_.shape.page_size)
    b.packed = static_cast<std::uint8_t>(ops::pack_page(source, la, target));
  if (a.packed)
    ops::unpack_page(source, lb, target);
  else if (!b.packed && la.codec.stores_as(lb.codec))
    std::memcpy(target, source, static_cast<std::size_t>(la.bytes));
  else if (!b.packed)
    for (int t = 0; t < a.tokens; ++t) ops::copy_token(source, la, t, target, lb, t);
  b.tokens = a.tokens;
  count_arrival(to, lb, lb.bytes - ops::packed_bytes(lb, a.packed ? a : b));
}

void CpuStore::count_arrival(Tier to, const PageLayout& l, std::int64_t spared) {
  const std::int64_t columns = std::int64_t{l.state_columns} * l.page_size * 4;
  const Stored as = to == Tier::host ? Stored::host : Stored::first;
  ledger_.move(to, Tag::keys, l.v - l.k - spared / 2, as);
  ledger_.move(to, Tag::values, l.k_meta - l.v - spared / 2, as);
  ledger_.move(to, Tag::codec_metadata, l.positions - l.k_meta, as);
  ledger_.move(to, Tag::positions, l.bytes - l.positions - columns, as);
  ledger_.move(to, Tag::scores, columns, as);
}

// Policies write token state in device pages, so the state of a page's host copy is stale.
void CpuStore::copy_state_down(int layer, int slot, int head, int page) {
  const PageEntry &upper = entries(Tier::device, layer, slot, head)[page],
                  &lower = entries(Tier::host, layer, slot, head)[page];
  const PageLayout &from = layout(Tier::device, upper), &to = layout(Tier::host, lower);
  const std::int64_t bytes = std::int64_t{to.state_columns} * to.page_size * 4;
  if (bytes == 0) return;
  std::memcpy(host_.at(lower.frame) + to.state, device_.at(upper.frame) + from.state, static_cast<std::size_t>(bytes));
  ledger_.move(Tier::host, Tag::scores, bytes, Stored::host);
}

// Call it when the tokens in a page have changed: a lower copy of a device page is stale, and so is the summary.
void CpuStore::outdated(int layer, int slot, int head, int page) {
  if (entries(Tier::device, layer, slot, head)[page].frame != null_frame)
    give_back(Tier::host, entries(Tier::host, layer, slot, head)[page]);
  summarize(layer, slot, head, page);
}

void CpuStore::exchange(int layer, int slot, int head, int a, int b) {
  const Place pa = place(layer, slot, head, a), pb = place(layer, slot, head, b);
  const PageLayout& l = *pa.layout;
  std::vector<std::byte> spare(static_cast<std::size_t>(l.bytes));
  ops::copy_token(pa.frame, l, pa.offset, spare.data(), l, 0);
  ops::copy_token(pb.frame, *pb.layout, pb.offset, pa.frame, l, pa.offset);
  ops::copy_token(spare.data(), l, 0, pb.frame, *pb.layout, pb.offset);
}

// Keeps the listed tokens (ascending places) and returns how many left. After few losses the last tokens fill the holes
// with one copy each, and other tokens are not touched. After many the kept tokens move up and stay in order.
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

  auto& touched = touched_;  // pages that got a token, ascending
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
      // kept[i] - i = the number of holes before kept[i]; it never falls with i.
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
  lower_pages_[head_index(layer, slot, head)] = std::min(lower_pages_[head_index(layer, slot, head)], pages_after);
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

// Calls body(slot, head, list) with the checked list of each row and head, and adds up what the calls return.
template <class Body>
Applied CpuStore::each_list(const Edit& e, const std::vector<std::int32_t>& slots, Body body) {
  const Shape& s = options_.shape;
  const bool tokens = e.verb == Edit::evict || e.verb == Edit::evict_rest || e.verb == Edit::move;
  std::vector<std::int32_t> dense;
  Applied total;
  for (std::size_t row = 0; row < slots.size(); ++row)
    for (int head = 0; head < s.kv_heads; ++head) {
      const int n = length(e.layer, slots[row], head);
      const int limit = tokens ? n : (n + s.page_size - 1) / s.page_size;
      const auto r = e.list.at(static_cast<std::int64_t>(row));
      std::span<const std::int32_t> list(&e.list.index(r, head, 0), static_cast<std::size_t>(e.list.count(r, head)));
      if (e.list.index.stride[2] != 1) {
        dense.clear();
        for (std::int64_t i = 0; i < e.list.count(r, head); ++i) dense.push_back(e.list.index(r, head, i));
        list = dense;
      }
      if (!valid(e, list, limit)) {
        for (const std::int32_t at : list)
          if (at < 0 || at >= limit)
            bad(e, "got index " + std::to_string(at) + ", wanted 0 to " + std::to_string(limit - 1));
        bad(e, "got a list that does not ascend");
      }
      total += body(slots[row], head, list);
      if (total.fit != Fit::ok) return total;
    }
  return total;
}

Applied CpuStore::keep_tokens(const Edit& e, const std::vector<std::int32_t>& slots) {
  std::vector<std::int32_t> kept;
  return each_list(e, slots, [&](int slot, int head, std::span<const std::int32_t> list) -> Applied {
    if (e.verb == Edit::evict) {
      kept.clear();
      std::size_t i = 0;
      for (int t = 0; t < length(e.layer, slot, head); ++t)
        if (i < list.size() && list[i] == t)
          ++i;
        else
          kept.push_back(t);
      list = kept;
    }
    return {Fit::ok, keep_only(e.layer, slot, head, list.data(), static_cast<int>(list.size()))};
  });
}

Applied CpuStore::evict_surplus(const Edit& e, const std::vector<std::int32_t>& slots, ops::Finding* nan) {
  const Surplus& x = e.surplus;
  const int p = options_.shape.page_size;
  const bool by_column = !x.scores && x.column >= 0;
  std::vector<std::int32_t> position, kept;
  std::vector<float> state;
  std::vector<char> leaves;
  Applied total;
  for (std::size_t row = 0; row < slots.size(); ++row)
    for (int head = 0; head < options_.shape.kv_heads; ++head) {
      const auto r = static_cast<std::int64_t>(row);
      const int n = length(e.layer, slots[row], head), keep = x.keep(r, head);
      if (keep >= n) continue;
      if (x.scores && x.scores.extent[2] < n)
        bad(e, "got scores of " + std::to_string(x.scores.extent[2]) + " tokens, wanted " + std::to_string(n));
      position.resize(static_cast<std::size_t>(n));
      state.resize(by_column ? position.size() : 0);
      for (int t = 0; t < n; t += p) {
        const Place page = place(e.layer, slots[row], head, t);
        const auto bytes = static_cast<std::size_t>(std::min(p, n - t)) * 4;
        std::memcpy(position.data() + t, page.frame + page.layout->positions, bytes);
        if (by_column)
          std::memcpy(state.data() + t, page.frame + page.layout->state + std::int64_t{x.column} * p * 4, bytes);
      }
      const float* score = x.scores ? &x.scores(r, head, 0) : by_column ? state.data() : nullptr;
      for (int t = 0; score && nan && t < n; ++t)
        if (score[t] != score[t]) {
          ++nan->count;
          nan->first = std::max(nan->first, ops::Finding::key(e.layer, head, position[static_cast<std::size_t>(t)]));
        }
      ops::mark_surplus(score, position.data(), n, keep, x.pins ? x.pins[r] : Pins{}, leaves);
      kept.clear();
      for (int t = 0; t < n; ++t)
        if (!leaves[static_cast<std::size_t>(t)]) kept.push_back(t);
      total += {Fit::ok, keep_only(e.layer, slots[row], head, kept.data(), static_cast<int>(kept.size()))};
    }
  return total;
}

Applied CpuStore::swap_tokens(const Edit& e, const std::vector<std::int32_t>& slots) {
  return each_list(e, slots, [&](int slot, int head, std::span<const std::int32_t> list) {
    if (list.size() % 2) bad(e, "got an odd number of places in a move, wanted pairs");
    Applied done;
    for (std::size_t i = 0; i < list.size(); i += 2) {
      const int a = list[i], b = list[i + 1];
      if (a == b) continue;
      exchange(e.layer, slot, head, a, b);
      for (int t : {a, b}) outdated(e.layer, slot, head, t / options_.shape.page_size);
      ++done.changed;
    }
    return done;
  });
}

Applied CpuStore::edit_pages(const Edit& e, const std::vector<std::int32_t>& slots) {
  return each_list(e, slots, [&](int slot, int head, std::span<const std::int32_t> list) {
    if (e.verb == Edit::encode) return encode_pages(e, slot, head, list);
    Applied done;
    for (const int page : list) {
      done += edit_page(e, slot, head, page);
      if (done.fit != Fit::ok) break;
    }
    return done;
  });
}

// Offloads, recalls or drops one page.
Applied CpuStore::edit_page(const Edit& e, int slot, int head, int page) {
  PageEntry& device = entries(Tier::device, e.layer, slot, head)[page];
  PageEntry& host = entries(Tier::host, e.layer, slot, head)[page];
  if (e.verb == Edit::drop) {
    PageEntry& from = e.tier == Tier::host ? host : device;
    const PageEntry& other = e.tier == Tier::host ? device : host;
    if (from.frame == null_frame) return {};
    if (other.frame == null_frame)
      bad(e, "got a drop of page " + std::to_string(page) + "'s only copy, wanted an evict or an offload first");
    if (e.tier == Tier::device) copy_state_down(e.layer, slot, head, page);
    give_back(e.tier, from);
    return {Fit::ok, 1};
  }
  const bool up = e.verb == Edit::recall;
  PageEntry& to = up ? device : host;
  if (to.frame != null_frame) return {};  // an existing copy is valid
  const Tier tier = up ? Tier::device : Tier::host;
  if (!take(tier, to, 0)) return {Fit::out_of_memory, 0};
  if (!up || !comes_without_keys(e, slot, head, page)) {
    copy_page(e.layer, slot, head, page, up ? Tier::host : Tier::device, tier);
    return {Fit::ok, 1};
  }
  const PageLayout& l = host_layout_;  // the device's is the same
  std::memcpy(device_.at(to.frame) + l.v, host_.at(host.frame) + l.v, static_cast<std::size_t>(l.bytes - l.v));
  to.tokens = host.tokens;
  count_arrival(tier, l);
  ledger_.move(tier, Tag::keys, l.k - l.v, Stored::first);
  return {Fit::ok, 1};
}

bool CpuStore::comes_without_keys(const Edit& e, int slot, int head, int page) const {
  return e.verb == Edit::recall && e.keys && options_.host_codec == options_.codecs[0] &&
         e.keys->cover(slot, head, page, options_.shape.page_size);
}

void CpuStore::rebuild_pages(const Edit& e, int slot, int head, const std::vector<int>& pages) {
  const int p = options_.shape.page_size, dim = options_.shape.head_dim;
  over_rows(static_cast<std::int64_t>(pages.size()), [&](std::int64_t i) {
    const Place to = place(e.layer, slot, head, pages[static_cast<std::size_t>(i)] * p);
    std::vector<float> keys(static_cast<std::size_t>(p * dim));
    ops::rebuild_keys(*e.keys, slot, head, pages[static_cast<std::size_t>(i)] * p, p,
                      reinterpret_cast<const std::int32_t*>(to.frame + to.layout->positions), options_.rope_table,
                      keys.data(), dim);
    for (int t = 0; t < p; ++t)
      ops::write_row(to.frame, *to.layout, KvSide::key, t, &keys[static_cast<std::size_t>(t * dim)]);
  });
}

Fit CpuStore::recall_layer(int layer, int slot) {
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

// The device keeps the chosen pages and as many others as there is room for, the newest of them or those that
// Edit::order ranks highest. Every full page has a copy below before it may leave. `changed` counts the pages that come
// and leave.
Applied CpuStore::place_pages(const Edit& e, const std::vector<std::int32_t>& slots) {
  const Shape& s = options_.shape;
  const int p = s.page_size;
  Applied done;
  std::vector<bool> chosen;
  std::vector<int> others;   // pages that may leave, the first to leave first
  std::vector<int> rebuilt;  // pages that came without keys
  Edit part = e;
  for (std::size_t row = 0; row < slots.size(); ++row)
    for (int head = 0; head < s.kv_heads; ++head) {
      const int slot = slots[row], n = length(e.layer, slot, head), pages = (n + p - 1) / p;
      if (!spills(slot) || pages == 0 || !e.heads.on(slot, head)) continue;
      choose_listed(e, static_cast<int>(row), head, n, p, p, "place edit: got page ", chosen);
      chosen[static_cast<std::size_t>(pages - 1)] = true;
      const PageEntry* device = entries(Tier::device, e.layer, slot, head);
      const auto edit = [&](Edit::Verb verb, int page) {
        part.verb = verb;
        Applied one = edit_page(part, slot, head, page);
        while (one.fit != Fit::ok && verb == Edit::recall && spill_one()) one = edit_page(part, slot, head, page);
        done.fit = one.fit;
        if (verb != Edit::offload) done.changed += one.changed;
        return one.fit == Fit::ok;
      };
      if (e.order && e.order.extent[2] < pages)
        bad(e, "got an order of " + std::to_string(e.order.extent[2]) + " pages, wanted " + std::to_string(pages));
      others.clear();
      int stays = std::max(slot_room(slot), e.rooms ? e.rooms(static_cast<std::int64_t>(row), head) : e.room);
      for (int page = 0; page < pages; ++page) {
        const bool there = device[page].frame != null_frame, here = chosen[static_cast<std::size_t>(page)];
        if (there && device[page].tokens == p && !edit(Edit::offload, page)) return done;
        if (there && !here) others.push_back(page);
        stays -= here;
      }
      const auto key = [&](int page) {
        return ops::selection_key(e.order(e.list.at(static_cast<std::int64_t>(row)), head, page),
                                  static_cast<std::uint32_t>(page));
      };
      if (e.order) std::sort(others.begin(), others.end(), [&](int a, int b) { return key(a) < key(b); });
      const int leave = static_cast<int>(others.size()) - std::max(0, stays);
      for (int i = 0; i < leave; ++i) edit(Edit::drop, others[static_cast<std::size_t>(i)]);
      rebuilt.clear();
      for (int page = 0; page < pages && done.fit == Fit::ok; ++page) {
        if (!chosen[static_cast<std::size_t>(page)]) continue;
        const bool there = device[page].frame != null_frame;
        if (edit(Edit::recall, page) && !there && comes_without_keys(part, slot, head, page)) rebuilt.push_back(page);
      }
      if (!rebuilt.empty()) rebuild_pages(part, slot, head, rebuilt);
      if (done.fit != Fit::ok) return done;
    }
  return done;
}

void CpuStore::mark_heads(const Heads& heads, const std::vector<std::int32_t>& slots, HeadFlags out) {
  for (const int slot : slots)
    for (int head = 0; head < options_.shape.kv_heads; ++head) out(slot, head) = heads.on(slot, head);
}

void CpuStore::count_spare(const Edit& e, int slot) {
  const Shape& s = options_.shape;
  const int p = s.page_size;
  std::vector<bool> chosen;
  Spare& spare = spare_[layer_slot(e.layer, slot)];
  for (int head = 0; head < s.kv_heads; ++head) {
    const int n = length(e.layer, slot, head), pages = (n + p - 1) / p;
    if (pages == 0 || !e.heads.on(slot, head)) continue;
    const auto &low = entries(Tier::host, e.layer, slot, head), &here = entries(Tier::device, e.layer, slot, head);
    for (int page = 0; page < n / p; ++page) spare.write += low[page].frame == null_frame;
    choose_listed(e, 0, head, n, p, p, "place edit: got page ", chosen);
    chosen[static_cast<std::size_t>(pages - 1)] = true;
    const int stay = static_cast<int>(std::count(chosen.begin(), chosen.end(), true));
    int others = 0;
    for (int page = 0; page < pages; ++page)
      others += here[page].frame != null_frame && !chosen[static_cast<std::size_t>(page)];
    spare.leave += std::max(0, others - std::max(0, e.room - stay));
  }
}

IndexList CpuStore::attend_list(const Edit& e, const std::vector<std::int32_t>& slots, Workspace& w) {
  const Shape& s = options_.shape;
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
      choose_listed(e, row, head, n, unit, p, of_pages ? "attend list: got page " : "attend list: got token ", chosen);
      if (e.resident) {
        const PageEntry* device = this->entries(Tier::device, e.layer, slots[static_cast<std::size_t>(row)], head);
        for (int i = 0; i < entries; ++i)
          if (device[i].frame != null_frame) chosen[static_cast<std::size_t>(i)] = true;
      }
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
