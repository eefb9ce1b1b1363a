// Magnitudes of turned queries, partial keys, and scores by them.
#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "base/half.hpp"
#include "cases/on_caches.hpp"
#include "cases/relative_error.hpp"
#include "ops/score/partial_keys.hpp"
#include "store/workspace.hpp"

namespace kvlab::cases {
namespace {

// Partial keys of every slot of a cache, all of them in vectors. Any directions of about length 1 serve.
struct Partial {
  std::int64_t slots, heads, dim, count, row;
  std::vector<std::uint16_t> rows;
  std::vector<std::int32_t> channels;
  std::vector<float> directions;
  PartialKeys view;

  Partial(OnCache& x, std::int64_t of_count, bool turned)
      : slots(x.kv.length.extent[0]),
        heads(x.kv.kv_heads),
        dim(x.kv.head_dim),
        count(of_count),
        row(x.n % 2 ? count : (count + 7) / 8 * 8),  // KeptPartialKeys has rows of whole 16 bytes
        rows(static_cast<std::size_t>(slots * heads * x.c.room() * row), 0x7e01),
        channels(static_cast<std::size_t>(slots * heads * count)),
        directions(turned ? x.c.normal(heads * dim * dim) : std::vector<float>{}) {
    for (float& d : directions) d /= std::sqrt(static_cast<float>(dim));  // turned vectors are as long as the others
    for (auto& c : channels) c = static_cast<std::int32_t>(x.c.rng() % static_cast<unsigned>(dim));
    view.rows = View<std::uint16_t, 4>::dense(rows.data(), {slots, heads, x.c.room(), row});
    view.rows.extent[3] = count;
    view.channels = View<const std::int32_t, 3>::dense(channels.data(), {slots, heads, count});
    if (turned) view.directions = Directions::dense(directions.data(), {heads, dim, dim});
  }
  PartialKeys put(Place& place) const {
    PartialKeys there{place.put(whole(view.rows)), place.put(view.channels), {}};
    if (view.directions) there.directions = place.put(view.directions);
    there.rows.extent[3] = count;
    return there;
  }
  // With the room between rows.
  static View<std::uint16_t, 4> whole(View<std::uint16_t, 4> rows) {
    rows.extent[3] = rows.stride[2];
    return rows;
  }
};

void check_magnitudes(OnCache& x) {
  Ledger ledger;
  StoreWorkspace w(ledger, x.stream());
  const Partial some(x, 1, true);
  const Directions directions = x.place.put(some.view.directions);
  for (const std::int64_t count : {1, 19, 300}) {
    if (count == 300 && x.n % 4) continue;
    Numbers<4> queries(x, {x.c.rows(), x.c.heads(), count, x.kv.head_dim});
    Numbers<3> sums(x, {some.slots, some.heads, some.dim});
    const View<const float, 4> there = queries.put();
    x.same<3>(
        "add_channel_magnitudes", sums.own(), 1e-5,
        [&](const View<float, 3>& out) { ops::add_channel_magnitudes(x.there, there, directions, out, w, x.stream()); },
        [&](const View<float, 3>& out) {
          ops::add_channel_magnitudes_reference(x.kv, queries.view(), some.view.directions, out);
        });
  }
}

// The sum of the magnitudes of a score's terms, for one query head.
double magnitude(const Partial& partial, const View<const float, 3>& queries, std::int64_t row, std::int64_t query,
                 std::int64_t head, std::int64_t slot, std::int64_t token) {
  double sum = 0;
  for (std::int64_t i = 0; i < partial.count; ++i) {
    const std::int64_t channel = partial.view.channels(slot, head, i);
    double along = 0;
    if (!partial.view.directions) along = double{queries(row, query, channel)};
    for (std::int64_t d = 0; partial.view.directions && d < partial.dim; ++d)
      along += double{queries(row, query, d)} * double{partial.view.directions(head, channel, d)};
    sum += std::abs(along * double{half_to_float(partial.view.rows(slot, head, token, i))});
  }
  return sum;
}

// How far scores may be off. Ops sum `count` products in f32, and terms that cancel are far larger than their sum. So
// the bound goes by the sum of the terms' magnitudes, a half step of f32 for each rounding: one of the query's number,
// one of its product, count - 1 of sums and one of the reference's score. Products with a power of two are exact. Two
// more are room for what double rounds. What no op writes may not differ at all.
std::vector<double> bounds_of_scores(const PagedKv& kv, const Partial& partial, const View<const float, 3>& queries,
                                     double factor, const View<float, 3>& scores) {
  std::vector<double> most(static_cast<std::size_t>(scores.extent[0] * scores.extent[1] * scores.extent[2]));
  const std::int64_t group = queries.extent[1] / kv.kv_heads;
  for (std::int64_t r = 0; r < kv.rows; ++r)
    for (std::int64_t h = 0; h < kv.kv_heads; ++h)
      for (std::int64_t t = 0; t < kv.tokens(static_cast<int>(r), static_cast<int>(h)); ++t) {
        double& bound = most[static_cast<std::size_t>((r * scores.extent[1] + h) * scores.extent[2] + t)];
        for (std::int64_t g = h * group; g < (h + 1) * group; ++g)
          bound =
              std::fmax(bound, factor * magnitude(partial, queries, r, g, h, kv.slots[r], t));  // the greatest counts
        bound *= static_cast<double>(partial.count + 4) * 0x1p-24;
      }
  return most;
}

void check_scores(OnCache& x) {
  x.kv.rope = x.there.rope = RopeRegime::original;  // keys count as they are stored
  const Stream s = x.stream();
  Ledger ledger;
  StoreWorkspace w(ledger, s);
  for (const bool turned : {false, true}) {
    const std::int64_t dim = x.kv.head_dim,
                       count = std::array<std::int64_t, 4>{1, dim / 5 + 1, dim / 2 + 3, dim}[x.c.rng() % 4];
    const auto scope = x.check.in(fmt::format("{} of {} channels{}", count, dim, turned ? ", turned" : ""));
    Partial partial(x, count, turned);
    if (turned && x.n % 3 == 0)  // what f16 cannot hold
      for (float& d : partial.directions) d *= 3e4f;
    const PartialKeys there = partial.put(x.place);
    Numbers<3> queries(x, {x.c.rows(), x.c.heads(), dim}), scores(x, {x.c.rows(), x.c.kv_heads(), x.c.room()});
    if (x.n % 5 == 0) queries.own()(0, 0, dim - 1) = std::numeric_limits<float>::quiet_NaN();
    const auto queries_there = queries.put();
    for (const int last : {0, 3, static_cast<int>(x.c.room())}) {
      ops::copy_partial_keys(x.there, last, there, s);
      ops::copy_partial_keys_reference(x.kv, last, partial.view);
      x.check.that(fmt::format("rows of the {} newest", last), x.place.get(Partial::whole(there.rows)) == partial.rows);
    }
    const int newest = static_cast<int>(x.c.rng() % 3);
    const Scores got = x.place.put(scores.own());
    ops::partial_scores(x.there, queries_there, there, .125f, newest, got, w, s);
    std::vector<float> wanted = Guarded<3>::copy(scores.own());
    ops::partial_scores_reference(x.kv, queries.view(), partial.view, .125f, newest,
                                  Scores::dense(wanted.data(), got.extent));
    x.check.within(
        "partial_scores, in units of what f32 may round",
        share_of_bound(x.place.get(got), wanted, bounds_of_scores(x.kv, partial, queries.view(), .125, scores.own())),
        1);
  }
}

void check_pages(OnCache& x) {
  const std::int64_t rows = x.c.rows(), heads = x.c.kv_heads(), room = x.c.room();
  ListMemory memory[3];
  const TokenList tokens{memory[0].empty({rows, heads, room})};
  const PageList wanted{memory[1].empty({rows, heads, room})}, got{memory[2].empty({rows, heads, room})};
  const unsigned every = 1 + x.n % 40;
  for (std::int64_t r = 0; r < rows; ++r)
    for (int h = 0; h < heads; ++h)
      for (int t = tokens.count(r, h) = 0; t < x.kv.tokens(static_cast<int>(r), h); ++t)
        if (x.c.rng() % every == 0) tokens.index(r, h, tokens.count(r, h)++) = t;
  const PageList there = x.place.put(got);
  const int newest = static_cast<int>(x.n % 3);
  ops::token_pages(x.there, x.place.put(tokens), newest, there, x.stream());
  ops::token_pages_reference(x.kv, tokens, newest, wanted);
  const auto counts = x.place.get(there.count), pages = x.place.get(there.index);
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t h = 0; h < heads; ++h) {
      const auto first = static_cast<std::ptrdiff_t>((r * heads + h) * room);
      x.check.equal("token_pages",
                    std::vector<std::int32_t>(pages.begin() + first,
                                              pages.begin() + first + counts[static_cast<std::size_t>(r * heads + h)]),
                    std::vector<std::int32_t>(&wanted.index(r, h, 0), &wanted.index(r, h, 0) + wanted.count(r, h)));
    }
}

std::vector<Case> list() {
  return {on_caches("partial_keys", "magnitudes of turned queries", 24, check_magnitudes),
          on_caches("partial_keys", "rows and scores", 36, check_scores),
          on_caches("partial_keys", "pages of tokens", 24, check_pages)};
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
