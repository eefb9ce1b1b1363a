// Clusters of keys: made for ragged rows and appended to, scored, and turned into lists of tokens.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cases/on_caches.hpp"
#include "ops/select/clusters.hpp"
#include "store/workspace.hpp"

namespace kvlab::cases {
namespace {

using Ints = std::vector<std::int32_t>;

// Clusters of a cache, all of it in vectors.
struct Index {
  std::vector<float> centroid;
  Ints size, token, bound;
  KeyClusters view;

  Index(std::int64_t slots, std::int64_t heads, std::int64_t room, std::int64_t tokens, std::int64_t dim)
      : centroid(static_cast<std::size_t>(slots * heads * room * dim), -7),
        size(static_cast<std::size_t>(slots * heads * room), -7),
        token(static_cast<std::size_t>(slots * heads * tokens), -7),
        bound(static_cast<std::size_t>(slots * heads * 2), 0) {
    view.centroid = View<float, 4>::dense(centroid.data(), {slots, heads, room, dim});
    view.size = View<std::int32_t, 3>::dense(size.data(), {slots, heads, room});
    view.token = View<std::int32_t, 3>::dense(token.data(), {slots, heads, tokens});
    view.bound = View<std::int32_t, 3>::dense(bound.data(), {slots, heads, 2});
  }
  KeyClusters put(Place& place) const {
    return {place.put(view.centroid), place.put(view.size), place.put(view.token), place.put(view.bound)};
  }
};

void same_clusters(OnCache& x, const char* what, const KeyClusters& there, const Index& wanted) {
  const auto scope = x.check.in(what);
  x.check.equal("bounds", x.place.get(there.bound), wanted.bound);
  x.check.equal("sizes", x.place.get(there.size), wanted.size);
  x.check.equal("tokens", x.place.get(there.token), wanted.token);
  x.check.equal("centroids", x.place.get(there.centroid), wanted.centroid, 0);
}

// A range of each row, within its shortest head. One row of four stays as it is, and one has no clusters.
std::vector<ClusterRange> some_ranges(OnCache& x) {
  std::vector<ClusterRange> ranges;
  for (int r = 0; r < x.kv.rows; ++r) {
    int n = x.kv.tokens(r, 0);
    for (int h = 1; h < x.kv.kv_heads; ++h) n = std::min(n, x.kv.tokens(r, h));
    ClusterRange range;
    const int kind = static_cast<int>(x.c.rng() % 8);
    if (kind < 2) {
      if (kind == 0) range.from = n, range.clusters = 0;
    } else if (n > 0) {
      range.from = static_cast<int>(x.c.rng() % static_cast<unsigned>((n + 1) / 2));
      range.tokens = 1 + static_cast<int>(x.c.rng() % static_cast<unsigned>(n - range.from));
      range.clusters = 1 + static_cast<int>(x.c.rng() % static_cast<unsigned>(std::min(range.tokens, 9)));
    }
    ranges.push_back(range);
  }
  return ranges;
}

// A list op must leave what the reference leaves.
template <class Op, class Plain>
void same_list(OnCache& x, const char* what, const Op& op, const Plain& plain) {
  const std::int64_t rows = x.c.rows(), heads = x.c.kv_heads(), longest = x.c.room();
  Ints entries(static_cast<std::size_t>(rows * heads * longest)), count(static_cast<std::size_t>(rows * heads));
  TokenList list;
  list.index = View<std::int32_t, 3>::dense(entries.data(), {rows, heads, longest});
  list.count = View<std::int32_t, 2>::dense(count.data(), {rows, heads});
  const TokenList there = x.place.put(list);
  plain(list);
  op(there);
  const auto scope = x.check.in(what);
  x.check.equal("counts", x.place.get(there.count), count);
  Ints got = x.place.get(there.index);
  for (std::size_t head = 0; head < count.size(); ++head)  // what lies behind a list means nothing
    for (auto i = static_cast<std::size_t>(count[head]); i < static_cast<std::size_t>(longest); ++i)
      got[head * static_cast<std::size_t>(longest) + i] = entries[head * static_cast<std::size_t>(longest) + i];
  x.check.equal("tokens", got, entries);
}

void check_choice(OnCache& x, const Index& index, const KeyClusters& there) {
  const Stream s = x.stream();
  const std::int64_t rows = x.c.rows(), heads = x.c.kv_heads(), room = index.view.size.extent[2];
  Numbers<3> queries(x, {rows, x.c.heads(), x.kv.head_dim}), scores(x, {rows, heads, room});
  const auto queries_there = queries.put();
  x.same<3>(
      "cluster_scores", scores.own(), 1e-6,
      [&](Scores out) { ops::cluster_scores(x.there, queries_there, there, out, s); },
      [&](Scores out) { ops::cluster_scores_reference(x.kv, queries.view(), index.view, out); });
  for (const bool ties : {false, true}) {
    for (std::int64_t r = 0; ties && r < rows; ++r)
      for (std::int64_t h = 0; h < heads; ++h)
        for (std::int64_t c = 0; c < room; ++c)
          scores.own()(r, h, c) = x.c.rng() % 5 ? static_cast<float>(x.c.rng() % 3) : NAN;
    Ints most;
    for (std::int64_t i = 0; i < rows * heads; ++i) most.push_back(static_cast<int>(x.c.rng() % 40) - 2);
    const auto most_view = View<const std::int32_t, 2>::dense(most.data(), {rows, heads});
    const int first = static_cast<int>(x.c.rng() % 4);
    same_list(
        x, ties ? "cluster_tokens, with ties" : "cluster_tokens",
        [&](const TokenList& list) {
          ops::cluster_tokens(x.there, scores.put(), x.place.put(most_view), first, there, list, s);
        },
        [&](const TokenList& list) {
          ops::cluster_tokens_reference(x.kv, scores.view(), most_view, first, index.view, list);
        });
  }
}

// Shares of random queries, thresholds of shares with ties, and lists by them.
void check_shares(OnCache& x, Workspace& w, const Index& index, const KeyClusters& there) {
  const Stream s = x.stream();
  const std::int64_t rows = x.c.rows(), heads = x.c.kv_heads(), room = index.view.size.extent[2];
  for (const std::int64_t count : {1, 5}) {
    Numbers<4> queries(x, {rows, x.c.heads(), count, x.kv.head_dim}, count == 1 ? 1.f : 30.f);
    Numbers<3> shares(x, {rows, heads, room});
    if (count == 1 && x.n % 3 == 0) queries.own()(0, 0, 0, 0) = NAN;
    const auto queries_there = x.place.put(queries.view());
    x.same<3>(
        "cluster_shares", shares.own(), 1e-6,
        [&](Scores out) { ops::cluster_shares(x.there, queries_there, .125f, there, out, w, s); },
        [&](Scores out) { ops::cluster_shares_reference(x.kv, queries.view(), .125f, index.view, out); });
  }
  const std::int64_t slots = index.view.bound.extent[0];
  Numbers<3> shares(x, {slots, heads, room});
  for (std::int64_t i = 0; x.n % 2 && i < slots * heads * room; ++i) {
    const float special[] = {0, 1, 2, 1e-40f, -1, NAN};
    shares.own().data[i] = special[x.c.rng() % 6];
  }
  const auto shares_there = shares.put();
  Numbers<1> start(x, {slots});
  for (const double q : {0., .5, .9, 1.}) {
    x.same<1>(
        "share_quantile", start.own(), 1e-7,
        [&](View<float, 1> out) { ops::share_quantile(x.there, shares_there, q, there, out, s); },
        [&](View<float, 1> out) { ops::share_quantile_reference(x.kv, shares.view(), q, index.view, out); });
  }
  for (std::int64_t i = 0; i < slots; ++i) start.own()(i) = static_cast<float>(x.c.rng() % 3);
  Numbers<3> of_rows(x, {rows, heads, room});
  std::copy_n(shares.own().data, rows * heads * room, of_rows.own().data);
  same_list(
      x, "cluster_tokens_above",
      [&](const TokenList& list) { ops::cluster_tokens_above(x.there, of_rows.put(), start.put(), there, list, s); },
      [&](const TokenList& list) {
        ops::cluster_tokens_above_reference(x.kv, of_rows.view(), start.view(), index.view, list);
      });
}

// Coarse clusters of what the index has, and the sizes that thresholds leave.
void check_coarse(OnCache& x, Workspace& w, const Index& finer, const KeyClusters& finer_there) {
  const Stream s = x.stream();
  const std::int64_t slots = finer.view.bound.extent[0], heads = x.c.kv_heads(), room = finer.view.size.extent[2];
  Index coarse(slots, heads, 6, room, x.kv.head_dim);
  const KeyClusters there = coarse.put(x.place);
  std::vector<ClusterRange> ranges(static_cast<std::size_t>(x.kv.rows));
  for (ClusterRange& range : ranges) {
    if (x.c.rng() % 5 == 0) continue;
    range.tokens = static_cast<int>(x.c.rng() % 9);  // some heads have fewer
    range.clusters =
        range.tokens ? 1 + static_cast<int>(x.c.rng() % static_cast<unsigned>(std::min(range.tokens, 6))) : 0;
  }
  const ClusterRule rule{static_cast<int>(x.n % 3), x.c.rng()};
  ops::cluster_centroids(x.there, finer_there, ranges, rule, there, w, s);
  ops::cluster_centroids_reference(x.kv, finer.view, ranges, rule, coarse.view);
  same_clusters(x, "cluster_centroids", there, coarse);
  Numbers<3> shares(x, {x.c.rows(), heads, 6});
  if (x.n % 3 == 0) shares.own()(0, 0, 0) = NAN;
  Numbers<1> threshold(x, {slots});
  Ints sizes(static_cast<std::size_t>(slots * heads * room), -7);
  const auto own = View<std::int32_t, 3>::dense(sizes.data(), {slots, heads, room});
  const auto sizes_there = x.place.put(own);
  ops::sizes_within(x.there, shares.put(), threshold.put(), there, finer_there, sizes_there, s);
  ops::sizes_within_reference(x.kv, shares.view(), threshold.view(), coarse.view, finer.view, own);
  x.check.equal("sizes_within", x.place.get(sizes_there), sizes);
  Index left = finer;
  left.size = sizes;
  for (std::size_t i = 0; i < sizes.size(); ++i) left.size[i] = std::max(0, sizes[i]);
  left.view = finer.view;
  left.view.size = View<std::int32_t, 3>::dense(left.size.data(), {slots, heads, room});
  KeyClusters left_there = finer_there;
  left_there.size = x.place.put(left.view.size);
  Numbers<4> queries(x, {x.c.rows(), x.c.heads(), 1, x.kv.head_dim});
  Numbers<3> out(x, {x.c.rows(), heads, room});
  const auto queries_there = queries.put();
  x.same<3>(
      "cluster_shares of what is left", out.own(), 1e-6,
      [&](Scores to) { ops::cluster_shares(x.there, queries_there, .125f, left_there, to, w, s); },
      [&](Scores to) { ops::cluster_shares_reference(x.kv, queries.view(), .125f, left.view, to); });
}

void check_clusters(OnCache& x) {
  x.kv.rope = x.there.rope = RopeRegime::original;  // keys count as they are stored
  const Stream s = x.stream();
  Ledger ledger;
  StoreWorkspace w(ledger, s);
  Index index(x.kv.length.extent[0], x.kv.kv_heads, 14, x.c.room(), x.kv.head_dim);
  const KeyClusters there = index.put(x.place);
  const ClusterRule rule{static_cast<int>(x.n % 4), x.c.rng()};
  const auto ranges = some_ranges(x);
  ops::cluster_keys(x.there, ranges, rule, there, w, s);
  ops::cluster_keys_reference(x.kv, ranges, rule, index.view);
  same_clusters(x, "cluster_keys", there, index);
  check_choice(x, index, there);
  check_shares(x, w, index, there);
  check_coarse(x, w, index, there);
  // Some heads have no room for them, or too few tokens.
  std::vector<ClusterRange> more(ranges.size());
  for (ClusterRange& range : more)
    if (x.c.rng() % 4) range = {.tokens = 11, .clusters = 6, .append = true};
  ops::cluster_keys(x.there, more, rule, there, w, s);
  ops::cluster_keys_reference(x.kv, more, rule, index.view);
  same_clusters(x, "cluster_keys that appends", there, index);
  check_choice(x, index, there);
  check_shares(x, w, index, there);
  check_coarse(x, w, index, there);
}

std::vector<Case> list() { return {on_caches("clusters", "of ragged rows", 48, check_clusters)}; }

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
