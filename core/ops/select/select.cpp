#include "ops/select/select.hpp"

#include <kvlab/ops.hpp>

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "base/device_op.hpp"
#include "base/joined_calls.hpp"
#include "ops/page/check.hpp"
#include "ops/page/paged.hpp"
#include "ops/select/chosen_tokens.hpp"

namespace kvlab::ops {
namespace {

constexpr std::int64_t parallel_tokens = 4096;  // fewer tokens take less time than starting threads

struct Scratch {
  std::vector<std::uint64_t> keys;
  std::vector<char> chosen;
  std::vector<std::int32_t> position, order;
  std::vector<float> age;
};

thread_local Scratch scratch;

// Adds the best of [0, n) to the `already` chosen entries until `keep` are chosen. Returns the number chosen.
int choose(const float* score, int n, int keep, int already, std::vector<char>& chosen) {
  const int wanted = std::min(keep, n) - already;
  if (wanted <= 0) return already;
  if (wanted == n - already - 1) {  // one token leaves, as in a decode step
    std::uint64_t least = std::numeric_limits<std::uint64_t>::max();
    for (int i = 0; i < n; ++i) {
      const std::uint64_t key = selection_key(score[i], static_cast<std::uint32_t>(i));
      least = !chosen[i] && key < least ? key : least;
    }
    std::fill_n(chosen.begin(), n, 1);
    chosen[selection_index(least)] = 0;
    return n - 1;
  }
  auto& keys = scratch.keys;
  keys.clear();
  for (int i = 0; i < n; ++i)
    if (!chosen[i]) keys.push_back(selection_key(score[i], static_cast<std::uint32_t>(i)));
  select_greatest(keys.data(), keys.size(), wanted);
  for (int i = 0; i < wanted; ++i) chosen[selection_index(keys[i])] = 1;
  return already + wanted;
}

// Returns whether pins name some of n tokens, but not all. Only then do text positions matter.
bool some(const Pins& pins, int n) {
  const std::int64_t named = std::int64_t{std::max(pins.first, 0)} + std::max(pins.last, 0);
  return named > 0 && named < n;
}

// Returns the text positions of a head, until the next call of this thread.
const std::int32_t* positions_of(const PagedKv& kv, int row, int head) {
  const int n = kv.tokens(row, head);
  scratch.position.resize(static_cast<std::size_t>(n));
  token_positions(kv, row, head, n, scratch.position.data());
  return scratch.position.data();
}

int mark_pins(const std::int32_t* position, int n, const Pins& pins, char* pinned) {
  const std::int64_t first = std::max(pins.first, 0), last = std::max(pins.last, 0);
  if (!some(pins, n)) {
    const bool all = first + last > 0;
    std::fill_n(pinned, n, all);
    return all ? n : 0;
  }
  // Positions need not ascend, and equal ones are pinned together.
  auto& order = scratch.order;
  order.assign(position, position + n);
  std::int32_t newest_first = 0, oldest_last = 0;
  const bool ascending = std::is_sorted(order.begin(), order.end());
  const auto at = [&](std::int64_t i) {
    if (!ascending) std::nth_element(order.begin(), order.begin() + i, order.end());
    return order[i];
  };
  if (first > 0) newest_first = at(first - 1);
  if (last > 0) oldest_last = at(n - last);
  const int any_first = first > 0, any_last = last > 0;
  int count = 0;
  for (int t = 0; t < n; ++t) {
    pinned[t] = (any_first & int{position[t] <= newest_first}) | (any_last & int{position[t] >= oldest_last});
    count += pinned[t];
  }
  return count;
}

void write_list(const IndexList& list, int row, int head, const std::vector<char>& chosen, int count) {
  list.count(list.at(row), head) = count;
  if (count == 0) return;
  std::int32_t* to = &list.index(list.at(row), head, 0);
  const std::int64_t step = list.index.stride[2];
  for (int i = 0, k = 0; k < count; ++i) {  // no branch on `chosen`, which is hard to predict
    to[k * step] = i;
    k += chosen[i];
  }
}

void check_room(const IndexList& list, int wanted, const char* op) {
  if (list.index.extent[2] < wanted)
    fail(Errc::internal, op,
         "got a list with room for " + std::to_string(list.index.extent[2]) + ", wanted " + std::to_string(wanted));
}

}  // namespace

void select_greatest(std::uint64_t* keys, std::size_t n, std::size_t count) {
  if (count == 0 || count >= n) return;
  if (count == n - 1) {  // one token leaves (a decode step): its place goes last
    std::swap(*std::min_element(keys, keys + n), keys[n - 1]);
    return;
  }
  std::nth_element(keys, keys + (count - 1), keys + n, std::greater<>());
}

int mark_pins(const PagedKv& kv, int row, int head, const Pins& pins, char* pinned) {
  const int n = kv.tokens(row, head);
  return mark_pins(some(pins, n) ? positions_of(kv, row, head) : nullptr, n, pins, pinned);
}

int mark_surplus(const float* score, const std::int32_t* position, int n, int keep, const Pins& pins,
                 std::vector<char>& leaves) {
  leaves.assign(static_cast<std::size_t>(n), 0);
  if (keep >= n) return 0;
  auto& age = scratch.age;
  if (!score) {
    age.assign(position, position + n);
    score = age.data();
  }
  const int pinned = mark_pins(position, n, pins, leaves.data());
  const int stay = choose(score, n, keep, pinned, leaves);
  for (char& c : leaves) c = !c;
  return n - stay;
}

void top_tokens(const PagedKv& kv, View<const float, 3> scores, View<const std::int32_t, 2> keep, const Pins* pins,
                TokenList list, Stream s) {
  TokenChoice choice;
  choice.keep = keep;
  choice.pins = pins;
  if (!keep.data && kv.rows > 0) fail(Errc::internal, "top_tokens", "got no numbers, wanted [row, kv_head] tokens");
  top_tokens(kv, scores, choice, list, s);
}

void top_tokens(const PagedKv& kv, View<const float, 3> scores, const TokenChoice& c, TokenList list, Stream s) {
  const char* op = "top_tokens";
  check_kv(kv, op, s);
  check_kv_scores(kv, scores, "scores", op, s);
  check_list(kv, list, op);
  if (c.keep.data && (c.keep.extent[0] < kv.rows || c.keep.extent[1] < kv.kv_heads))
    fail(Errc::internal, op, "got too few numbers, wanted [row, kv_head] tokens");
  if (s.device() != Device::cuda)
    chosen_tokens(kv, scores, c, list, s);
  else if (!join_call(ChosenTokens{kv, scores, c, list, s}))
    on_cuda<chosen_tokens>(kv, scores, c, list, s);
}

void ChosenTokens::run(const std::vector<ChosenTokens>& calls) {
  if (!cuda_reach_from_host()) return only_on_cuda<chosen_tokens_in_layers>(calls);
  for (const ChosenTokens& c : calls) on_cuda<chosen_tokens>(c.kv, c.scores, c.choice, c.list, c.stream);
}

// The two overloads of top_tokens have one CUDA version under this name.
void chosen_tokens(const PagedKv& kv, View<const float, 3> scores, const TokenChoice& c, TokenList list, Stream) {
  std::int64_t tokens = 0;
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) tokens += kv.tokens(r, h);
  int short_by = 0;                // entries of the longest list that has no room; a thread must not throw
  std::vector<std::int32_t> held;  // before any list changes
  for (int r = 0; !c.keep.data && r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) held.push_back(list.count(list.at(r), h));
#pragma omp parallel for schedule(static) reduction(max : short_by) if (tokens >= parallel_tokens)
  for (int i = 0; i < kv.rows * kv.kv_heads; ++i) {
    const int r = i / kv.kv_heads, h = i % kv.kv_heads;
    if (!c.heads.on(kv.slots[r], h)) continue;
    const int from = c.by ? c.by[h] : h, n = kv.tokens(r, from);
    const int keep =
        c.keep.data ? c.keep(r, h) : held[static_cast<std::size_t>(r * kv.kv_heads + (c.among ? c.among[h] : h))];
    auto& chosen = scratch.chosen;
    chosen.assign(static_cast<std::size_t>(n), 0);
    const int pinned = c.pins ? mark_pins(kv, r, from, c.pins[r], chosen.data()) : 0;
    int count = n > 0 ? choose(&scores(r, from, 0), n, keep, pinned, chosen) : 0;
    if (!c.keep.data) count = std::min(count, held[static_cast<std::size_t>(i)]);
    if (list.index.extent[2] < count)
      short_by = std::max(short_by, count);
    else
      write_list(list, r, h, chosen, count);
  }
  check_room(list, short_by, "top_tokens");
}

void top_pages(const PagedKv& kv, View<const float, 3> page_scores, View<const std::int32_t, 2> page_budgets, Pins pins,
               PageList out, Stream s) {
  const char* op = "top_pages";
  check_kv(kv, op, s);
  check_list(kv, out, op);
  if (page_scores.extent[0] < kv.rows || page_scores.extent[1] < kv.kv_heads || page_scores.stride[2] != 1)
    fail(Errc::internal, op, "got page scores of another shape, wanted [row, kv_head, page] contiguous");
  if (s.device() == Device::cuda) return on_cuda<top_pages>(kv, page_scores, page_budgets, pins, out, s);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int n = kv.pages(r, h);
      if (page_scores.extent[2] < n)
        fail(Errc::internal, op,
             "got scores of " + std::to_string(page_scores.extent[2]) + " pages, wanted " + std::to_string(n));
      auto& chosen = scratch.chosen;
      chosen.assign(n, 0);
      const int pinned = pins.newest_page && n > 0 ? 1 : 0;
      if (pinned) chosen[n - 1] = 1;
      check_room(out, std::max(pinned, std::min(n, page_budgets(r, h))), op);
      write_list(out, r, h, chosen, n > 0 ? choose(&page_scores(r, h, 0), n, page_budgets(r, h), pinned, chosen) : 0);
    }
}

void set_pinned(const PagedKv& kv, Pins pins, float value, Scores scores, Stream s) {
  const char* op = "set_pinned";
  check_kv(kv, op, s);
  check_scores(kv, scores, "scores", op, s);
  if (s.device() == Device::cuda) return on_cuda<set_pinned>(kv, pins, value, scores, s);
  const int group = static_cast<int>(scores.extent[1]) / kv.kv_heads;
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int n = kv.tokens(r, h);
      auto& pinned = scratch.chosen;
      pinned.resize(static_cast<std::size_t>(n));
      if (mark_pins(kv, r, h, pins, pinned.data()) == 0) continue;
      for (int q = h * group; q < (h + 1) * group; ++q)
        for (int t = 0; t < n; ++t) scores(r, q, t) = pinned[t] ? value : scores(r, q, t);
    }
}

}  // namespace kvlab::ops
