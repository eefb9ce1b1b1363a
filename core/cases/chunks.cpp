// Chunks of keys: made for ragged rows, scored, and turned into lists of tokens.
#include <fmt/format.h>

#include <cmath>

#include "cases/on_caches.hpp"
#include "ops/select/chunks.hpp"
#include "store/workspace.hpp"

namespace kvlab::cases {
namespace {

using Ints = std::vector<std::int32_t>;

struct Index {
  std::vector<float> landmark, cosine;
  Ints outlier, count;
  KeyChunks view;

  Index(std::int64_t slots, std::int64_t heads, std::int64_t room, std::int64_t dim, int size)
      : landmark(static_cast<std::size_t>(slots * heads * room * dim), -7),
        cosine(static_cast<std::size_t>(slots * heads * room), -7),
        outlier(cosine.size(), -7),
        count(static_cast<std::size_t>(slots * heads), 0) {
    view.landmark = View<float, 4>::dense(landmark.data(), {slots, heads, room, dim});
    view.cosine = View<float, 3>::dense(cosine.data(), {slots, heads, room});
    view.outlier = View<std::int32_t, 3>::dense(outlier.data(), {slots, heads, room});
    view.count = View<std::int32_t, 2>::dense(count.data(), {slots, heads});
    view.size = size;
  }
  KeyChunks put(Place& place) const {
    return {place.put(view.landmark), place.put(view.cosine), place.put(view.outlier), place.put(view.count),
            view.size};
  }
};

// What lies behind a list means nothing.
void check_list(OnCache& x, const std::string& what, View<const float, 3> scores, View<const float, 3> scores_there,
                const Index& index, const KeyChunks& there) {
  const std::int64_t rows = x.c.rows(), heads = x.c.kv_heads(), longest = x.c.room();
  Ints entries(static_cast<std::size_t>(rows * heads * longest)), count(static_cast<std::size_t>(rows * heads)), most;
  for (std::int64_t i = 0; i < rows * heads; ++i) most.push_back(static_cast<int>(x.c.rng() % 12) - 2);
  const auto most_view = View<const std::int32_t, 2>::dense(most.data(), {rows, heads});
  TokenList list;
  list.index = View<std::int32_t, 3>::dense(entries.data(), {rows, heads, longest});
  list.count = View<std::int32_t, 2>::dense(count.data(), {rows, heads});
  const TokenList list_there = x.place.put(list);
  ops::chunk_tokens_reference(x.kv, scores, most_view, index.view, list);
  ops::chunk_tokens(x.there, scores_there, x.place.put(most_view), there, list_there, x.stream());
  const auto scope = x.check.in(what);
  x.check.equal("counts", x.place.get(list_there.count), count);
  Ints got = x.place.get(list_there.index);
  for (std::size_t head = 0; head < count.size(); ++head)
    for (auto i = static_cast<std::size_t>(count[head]); i < static_cast<std::size_t>(longest); ++i)
      got[head * static_cast<std::size_t>(longest) + i] = entries[head * static_cast<std::size_t>(longest) + i];
  x.check.equal("tokens", got, entries);
}

void check_chunks(OnCache& x) {
  x.kv.rope = x.there.rope = RopeRegime::original;  // keys count as they are stored
  const Stream s = x.stream();
  const std::int64_t rows = x.c.rows(), heads = x.c.kv_heads(), dim = x.kv.head_dim;
  Ledger ledger;
  StoreWorkspace w(ledger, s);
  for (const int size : {1, 3, 8}) {
    const auto scope = x.check.in(fmt::format("chunks of {}", size));
    const std::int64_t room = x.c.room() / size;
    Index index(x.kv.length.extent[0], heads, room, dim, size);
    const KeyChunks there = index.put(x.place);
    const int local = static_cast<int>(x.c.rng() % 4), outliers = static_cast<int>(x.c.rng() % 6);
    ops::chunk_keys(x.there, local, outliers, there, s);
    ops::chunk_keys_reference(x.kv, local, outliers, index.view);
    x.check.equal("counts", x.place.get(there.count), index.count);
    x.check.equal("landmarks", x.place.get(there.landmark), index.landmark, 0);
    x.check.equal("cosines", x.place.get(there.cosine), index.cosine, 0);
    x.check.equal("outliers", x.place.get(there.outlier), index.outlier);
    Numbers<3> queries(x, {rows, x.c.heads(), dim}), scores(x, {rows, heads, room});
    if (size == 3) queries.own()(0, 0, 0) = NAN;
    const auto queries_there = queries.put();
    for (const GroupRule rule : {GroupRule::max, GroupRule::mean})
      x.same<3>(
          rule == GroupRule::max ? "chunk_scores, the greatest" : "chunk_scores, the mean", scores.own(), 1e-6,
          [&](Scores out) { ops::chunk_scores(x.there, queries_there, .125f, rule, there, out, w, s); },
          [&](Scores out) { ops::chunk_scores_reference(x.kv, queries.view(), .125f, rule, index.view, out); });
    check_list(x, "chunk_tokens of outliers", {}, {}, index, there);
    for (const bool ties : {false, true}) {
      for (std::int64_t i = 0; ties && i < rows * heads * room; ++i)
        scores.own().data[i] = x.c.rng() % 5 ? static_cast<float>(x.c.rng() % 3) : NAN;
      check_list(x, ties ? "chunk_tokens, with ties" : "chunk_tokens", scores.view(), scores.put(), index, there);
    }
  }
}

std::vector<Case> list() { return {on_caches("chunks", "of ragged rows", 48, check_chunks)}; }

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
