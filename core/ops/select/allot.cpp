#include "ops/select/allot.hpp"

#include <kvlab/fill_heads.hpp>
#include <kvlab/ops.hpp>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/select/select.hpp"

namespace kvlab::ops {
namespace {

int rows_of(const Allotment& a, const char* op) {
  const auto rows = a.keep.extent[0], heads = a.keep.extent[1];
  if (a.length.extent[0] < rows || a.length.extent[1] < heads)
    fail(Errc::internal, op, "got lengths of another shape than keep, wanted [row, kv_head]");
  return static_cast<int>(rows);
}

int pinned_of(const Allotment& a, int row) {
  return a.pins ? std::max(a.pins[row].first, 0) + std::max(a.pins[row].last, 0) : 0;
}

void allot_same(const Allotment& a, const std::int32_t* tokens, const char* op, Stream s) {
  const int rows = rows_of(a, op);
  if (rows > 0 && !tokens) fail(Errc::internal, op, "got no totals, wanted one per row");
  if (s.device() == Device::cuda) return on_cuda<allot_tokens>(a, tokens, s);
  for (int r = 0; r < rows; ++r)
    for (int h = 0; h < a.keep.extent[1]; ++h)
      a.keep(r, h) = std::min(a.length(r, h), std::max({tokens[r], pinned_of(a, r), 0}));
}

struct Scratch {
  std::vector<std::uint64_t> keys;
  std::vector<char> pinned;
  std::vector<int> free, count, keep;  // [kv_head]
  std::vector<std::int64_t> first;
  std::vector<double> share;
};

// Rounds share[h] to keep[h] <= free[h] with the given sum. Missing tokens go to the largest remainders, and surplus
// tokens leave the smallest. Of equal remainders the lower head gets the token.
void settle(const std::vector<double>& share, const std::vector<int>& free, std::int64_t sum, std::vector<int>& keep) {
  std::int64_t missing = sum;
  for (std::size_t h = 0; h < share.size(); ++h) {
    keep[h] = static_cast<int>(std::clamp(std::nearbyint(share[h]), 0., static_cast<double>(free[h])));
    missing -= keep[h];
  }
  for (; missing != 0; missing += missing > 0 ? -1 : 1) {
    int best = -1;
    for (int h = 0; h < static_cast<int>(share.size()); ++h) {
      if (missing > 0 ? keep[h] >= free[h] : keep[h] <= 0) continue;
      const double remainder = share[h] - keep[h];
      if (best < 0 || (missing > 0 ? remainder > share[best] - keep[best] : remainder < share[best] - keep[best]))
        best = h;
    }
    if (best < 0) return;
    keep[best] += missing > 0 ? 1 : -1;
  }
}

void allot_row(const Allotment& a, int row, double floor, bool exact_total, Scratch& x) {
  const int heads = static_cast<int>(a.keep.extent[1]);
  const int pinned = pinned_of(a, row), budget = std::max(a.total[row] - pinned, 0);
  x.keys.clear();
  x.free.assign(heads, 0);
  x.first.assign(heads + 1, 0);
  for (int h = 0; h < heads; ++h) {
    const int n = a.length(row, h);
    x.pinned.assign(n, 0);
    if (pinned > 0) mark_pins(a.kv->pages, row, h, a.pins[row], x.pinned.data());
    for (int t = 0; t < n; ++t)
      if (!x.pinned[t]) {
        x.keys.push_back(selection_key(a.scores(row, h, t), static_cast<std::uint32_t>(x.first[h] + t)));
        ++x.free[h];
      }
    x.first[h + 1] = x.first[h] + n;
  }
  const auto candidates = static_cast<std::int64_t>(x.keys.size());
  const std::int64_t sum = std::min<std::int64_t>(std::int64_t{heads} * budget, candidates);
  select_greatest(x.keys.data(), x.keys.size(), sum);
  x.count.assign(heads, 0);
  for (std::int64_t i = 0; i < sum; ++i) {
    const std::int64_t at = selection_index(x.keys[i]);
    ++x.count[std::upper_bound(x.first.begin(), x.first.end(), at) - x.first.begin() - 1];
  }
  x.share.resize(heads);
  x.keep.resize(heads);
  for (int h = 0; h < heads; ++h) x.share[h] = x.count[h] * (1 - floor) + std::trunc(budget * floor);
  if (exact_total)
    settle(x.share, x.free, sum, x.keep);
  else
    for (int h = 0; h < heads; ++h)
      x.keep[h] = static_cast<int>(std::min(std::nearbyint(x.share[h]), static_cast<double>(x.free[h])));
  for (int h = 0; h < heads; ++h) a.keep(row, h) = a.length(row, h) - x.free[h] + x.keep[h];
}

}  // namespace

void allot_uniform(const Allotment& a, Stream s) { allot_same(a, a.total, "allot_uniform", s); }

void allot_tokens(const Allotment& a, const std::int32_t* tokens, Stream s) {
  allot_same(a, tokens, "allot_tokens", s);
}

void allot_by_score(const Allotment& a, double floor, bool exact_total, Stream s) {
  const char* op = "allot_by_score";
  const int rows = rows_of(a, op);
  if (!(floor >= 0 && floor <= 1))
    fail(Errc::internal, op, "got a floor of " + std::to_string(floor) + ", wanted 0 to 1");
  if (rows > 0 && !a.total) fail(Errc::internal, op, "got no totals, wanted one per row");
  if (s.device() == Device::cuda) {
    if (rows > 0 && (a.scores.extent[0] < rows || a.scores.extent[1] < a.keep.extent[1] || (a.pins && !a.kv)))
      fail(Errc::internal, op,
           "got too few scores or pins without the cache, wanted [row, kv_head, token] and LayerKv");
    return on_cuda<allot_by_score>(a, floor, exact_total, s);
  }
  for (int r = 0; r < rows; ++r) {
    if (pinned_of(a, r) > 0 && !a.kv) fail(Errc::internal, op, "got pins without the cache, wanted LayerKv");
    for (int h = 0; h < a.keep.extent[1]; ++h)
      if (a.scores.extent[0] <= r || a.scores.extent[1] <= h || a.scores.extent[2] < a.length(r, h) ||
          (a.kv && a.kv->pages.tokens(r, h) != a.length(r, h)))
        fail(Errc::internal, op, "got scores or lengths of another shape, wanted [row, kv_head, token]");
  }
  thread_local Scratch x;
  for (int r = 0; r < rows; ++r) allot_row(a, r, floor, exact_total, x);
}

void round_allotment(View<const std::int32_t, 2> length, const std::uint8_t* keep_all, int page_size,
                     View<std::int32_t, 2> keep, Stream s) {
  const char* op = "round_allotment";
  const auto rows = keep.extent[0], heads = keep.extent[1];
  if (page_size < 1 || (rows > 0 && !keep_all) || length.extent[0] < rows || length.extent[1] < heads)
    fail(Errc::internal, op, "got too few lengths, no mask or no page size, wanted those of keep");
  if (s.device() == Device::cuda) return on_cuda<round_allotment>(length, keep_all, page_size, keep, s);
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t h = 0; h < heads; ++h)
      if (keep_all[r])
        keep(r, h) = length(r, h);
      else if (keep(r, h) < length(r, h))
        keep(r, h) -= keep(r, h) % page_size;
}

void share_of_keep(View<const std::int32_t, 2> keep, int pinned, double share, View<std::int32_t, 2> out, Stream s) {
  const char* op = "share_of_keep";
  if (keep.extent[0] < out.extent[0] || keep.extent[1] < out.extent[1])
    fail(Errc::internal, op, "got fewer numbers than it is to write, wanted [row, kv_head]");
  if (!(share >= 0 && share <= 1))
    fail(Errc::internal, op, "got a share of " + std::to_string(share) + ", wanted 0 to 1");
  if (s.device() == Device::cuda) return on_cuda<share_of_keep>(keep, pinned, share, out, s);
  for (std::int64_t r = 0; r < out.extent[0]; ++r)
    for (std::int64_t h = 0; h < out.extent[1]; ++h)
      out(r, h) = static_cast<std::int32_t>(share * std::max(0, keep(r, h) - pinned));
}

void numbers_of_rows(View<const std::int32_t, 2> of_slots, const std::int32_t* slots, View<std::int32_t, 2> out,
                     Stream s) {
  if (s.device() == Device::cuda) return on_cuda<numbers_of_rows>(of_slots, slots, out, s);
  for (std::int64_t r = 0; r < out.extent[0]; ++r)
    for (std::int64_t h = 0; h < out.extent[1]; ++h) out(r, h) = of_slots(slots[r], h);
}

void lengths_of_rows(const PagedKv& kv, const std::uint8_t* leave_out, View<std::int32_t, 2> out, Stream s) {
  if (s.device() == Device::cuda) return on_cuda<lengths_of_rows>(kv, leave_out, out, s);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) out(kv.slots[r], h) = leave_out[r] ? 0 : kv.tokens(r, h);
}

void fill_heads(View<std::int32_t, 2> out, std::int32_t value, Stream s) {
  if (s.device() == Device::cuda) return on_cuda<fill_heads>(out, value, s);
  for (std::int64_t r = 0; r < out.extent[0]; ++r)
    for (std::int64_t h = 0; h < out.extent[1]; ++h) out(r, h) = value;
}

}  // namespace kvlab::ops
