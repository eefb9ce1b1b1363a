// Copies of keys as indices: codes of 4 bits, the tokens that they choose, and keys by channel.
#include <fmt/format.h>
#include <kvlab/ops.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "cases/on_caches.hpp"
#include "ops/score/key_channels.hpp"
#include "ops/score/key_codes.hpp"
#include "ops/score/reference.hpp"
#include "ops/select/top_p.hpp"

namespace kvlab::cases {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

// Lists of pages or of tokens for rows, or for slots in another order. Those of slots last. `unit`: places of an entry.
struct Entries {
  int unit;
  ListMemory memory;
  std::vector<std::int32_t> slots;
  IndexList own, there;

  Entries(OnCache& x, int places, bool lasts) : unit(places) {
    const PagedOptions& o = x.c.cache.options();
    const int rows = x.c.rows();
    for (int r = 0; r < rows; ++r) slots.push_back(rows - 1 - r);
    own = memory.choose(
        o, o.max_pages * x.kv.page_size / unit,
        [&](int r, int h) { return (x.kv.tokens(lasts ? rows - 1 - r : r, h) + unit - 1) / unit; },
        [&] { return x.c.rng() % 3 > 0; });
    there = x.place.put(own);
    own.slots = lasts ? slots.data() : nullptr, there.slots = lasts ? x.place.put(slots) : nullptr;
  }
  std::int64_t most() const { return own.index.extent[2] * unit; }
  // Calls an op with a list of pages or of tokens.
  template <class Op>
  void on(const Op& op) const {
    unit > 1 ? op(PageList{there}) : op(TokenList{there});
  }
};

// Codes of every slot of a cache. A head of each has more room than it needs, and rows may begin anywhere.
struct Codes {
  std::vector<std::uint8_t> code;
  std::vector<float> range;
  KeyCodes view;

  explicit Codes(OnCache& x) {
    const std::int64_t slots = x.kv.length.extent[0], heads = x.kv.kv_heads, room = x.c.room(), row = x.kv.head_dim / 2;
    code.assign(static_cast<std::size_t>(slots * heads * room * row), 0x77);
    range.assign(static_cast<std::size_t>(slots * heads * room * 2), -7);
    view.code = View<std::uint8_t, 4>::dense(code.data(), {slots, heads, room, row});
    view.range = View<float, 4>::dense(range.data(), {slots, heads, room, 2});
  }
  KeyCodes put(Place& place) const { return {place.put(view.code), place.put(view.range)}; }
};

void check_codes(OnCache& x) {
  x.kv.rope = x.there.rope = RopeRegime::original;  // keys count as they are stored
  const Stream s = x.stream();
  const Codes codes(x);
  const KeyCodes there = codes.put(x.place);
  for (const int newest : {0, 1, 5, 1000}) {  // all of them in the end
    const auto scope = x.check.in(fmt::format("{} newest", newest));
    ops::code_keys(x.there, newest, there, s);
    ops::code_keys_reference(x.kv, newest, codes.view);
    x.check.equal("ranges", x.place.get(there.range), codes.range, 0);
    x.check.that("codes", x.place.get(there.code) == codes.code);
  }
  const double most = x.stream().device() == Device::cuda ? 2.1e-4 : Tolerance{}.score;
  for (const bool lasts : {false, true})
    for (const int unit : {x.kv.page_size, 1}) {
      const Entries list(x, unit, lasts);
      for (const std::int64_t heads : {x.c.kv_heads(), x.c.heads()}) {
        Numbers<3> vectors(x, {x.c.rows(), heads, x.kv.head_dim}, x.n % 3 ? 1 : 30);
        const auto vectors_there = vectors.put();
        const Guarded<3> start({x.c.rows(), heads, list.most() + 3});
        x.same<3>(
            fmt::format("coded_row_dot of {} heads, entries of {}", heads, unit), start.view(),
            x.n % 3 ? most : 30 * most,
            [&](Scores out) {
              list.on([&](const auto& of) { ops::coded_row_dot(x.there, vectors_there, of, there, out, s); });
            },
            [&](Scores out) { ops::coded_entry_dot_reference(x.kv, vectors.view(), list.own, unit, codes.view, out); });
      }
    }
}

// The lists lie between those of shares that are a little smaller and larger: how a sum is rounded may decide about a
// token.
void check_top_p(OnCache& x, int unit) {
  const Stream s = x.stream();
  const std::array<std::int64_t, 3> extent{x.c.rows(), x.c.kv_heads(), x.c.room()};
  for (const bool lasts : {false, true})
    for (const std::int64_t heads : {x.c.kv_heads(), x.c.heads()})
      for (unsigned kind = 0; kind < 4; ++kind) {
        const Entries from(x, unit, lasts);
        Numbers<3> logits(x, {x.c.rows(), heads, from.most()}, kind == 0 ? 3 : 12);
        for (std::int64_t r = 0; r < x.c.rows(); ++r)
          for (std::int64_t q = 0; q < heads; ++q)
            for (std::int64_t i = 0; i < from.most(); ++i) {
              float& logit = logits.own()(r, q, i);
              const int h = static_cast<int>(q / (heads / x.c.kv_heads()));
              if (kind == 2) logit = static_cast<float>(x.c.rng() % 4);  // ties
              if (kind == 3 && x.c.rng() % 4) logit = x.c.rng() % 2 ? -infinity : NAN;
              const int entry = static_cast<int>(i) / unit;
              if (entry < from.own.count(from.own.at(r), h) &&
                  from.own.index(from.own.at(r), h, entry) * unit + static_cast<int>(i) % unit >=
                      x.kv.tokens(static_cast<int>(r), h))
                logit = -infinity;
            }
        const auto there = logits.put();
        for (const int newest : {0, 1, 9})
          for (const float p : {.3f, .85f, 1.f}) {
            const auto scope = x.check.in(
                fmt::format("share {} of {} heads, entries of {}, kind {}, {} newest", p, heads, unit, kind, newest));
            ListMemory least, greatest, start;
            const TokenList low{least.empty(extent)}, high{greatest.empty(extent)},
                list{x.place.put(start.empty(extent))};
            const double slack = p < 1 ? 1e-6 : 0;
            ops::top_p_entries_reference(x.kv, logits.view(), from.own, unit, 4, p - slack, newest, low);
            ops::top_p_entries_reference(x.kv, logits.view(), from.own, unit, 4, p + slack, newest, high);
            from.on([&](const auto& of) { ops::top_p_candidates(x.there, there, of, 4, p, newest, list, s); });
            const std::vector<std::int32_t> index = x.place.get(list.index), count = x.place.get(list.count);
            for (std::int64_t r = 0; r < x.c.rows(); ++r)
              for (std::int64_t h = 0; h < x.c.kv_heads(); ++h) {
                const auto at = static_cast<std::size_t>(r * x.c.kv_heads() + h);
                const std::int32_t* got = index.data() + at * static_cast<std::size_t>(x.c.room());
                x.check.that("ascends",
                             std::adjacent_find(got, got + count[at], std::greater_equal<>()) == got + count[at]);
                const auto within = [&](const std::int32_t* a, int n, const std::int32_t* b, int m) {
                  return std::includes(b, b + m, a, a + n);
                };
                x.check.that("holds the tokens of a smaller share",
                             within(&low.index(r, h, 0), low.count(r, h), got, count[at]));
                x.check.that("holds only tokens of a larger share",
                             within(got, count[at], &high.index(r, h, 0), high.count(r, h)));
              }
          }
      }
}

void check_top_p_of_pages(OnCache& x) { check_top_p(x, x.kv.page_size); }
void check_top_p_of_tokens(OnCache& x) { check_top_p(x, 1); }

// Keys by channel of every slot of a cache.
struct Channels {
  std::vector<std::byte> bytes;
  KeyChannels view;

  Channels(OnCache& x, DType dtype) {
    view.dtype = dtype, view.slots = x.kv.length.extent[0], view.kv_heads = x.kv.kv_heads,
    view.head_dim = x.kv.head_dim;
    view.blocks = (x.c.room() + KeyChannels::block - 1) / KeyChannels::block;
    view.head_stride = view.blocks * view.head_dim * view.channel_stride();
    view.slot_stride = view.kv_heads * view.head_stride;
    bytes.assign(static_cast<std::size_t>(view.slots * view.slot_stride), std::byte{0x3c});
    view.data = bytes.data();
  }
  KeyChannels put(Place& place) const {
    KeyChannels there = view;
    there.data = place.put(bytes);
    return there;
  }
};

void check_channels(OnCache& x) {
  x.kv.rope = x.there.rope = RopeRegime::original;
  const Stream s = x.stream();
  const bool cuda = s.device() == Device::cuda;
  const DType dtype = x.n % 3 == 0 ? DType::f32 : x.n % 3 == 1 && cuda ? DType::f16 : DType::bf16;
  const Channels channels(x, dtype);
  const KeyChannels there = channels.put(x.place);
  const auto bytes = static_cast<std::int64_t>(channels.bytes.size());
  for (const int newest : {0, 1, 70, 1000}) {
    const auto scope = x.check.in(fmt::format("{} newest", newest));
    ops::copy_channels(x.there, newest, there, s);
    ops::copy_channels_reference(x.kv, newest, channels.view);
    x.check.that("keys by channel",
                 x.place.get(View<const std::byte, 1>::dense(there.data, {bytes})) == channels.bytes);
  }
  const std::int64_t rows = x.c.rows(), kv_heads = x.c.kv_heads(), dim = x.kv.head_dim;
  Numbers<3> queries(x, {rows, x.c.heads(), dim});
  if (x.n % 4 == 0) std::fill_n(&queries.own()(0, 0, 0), dim, 0.f);
  if (x.n % 4 == 1)  // ties
    for (std::int64_t d = 0; d < dim; ++d) queries.own()(0, 0, d) = d % 2 ? 1.f : -1.f;
  const auto queries_there = queries.put();
  for (const int rank : {1, 3, static_cast<int>(dim) / 4, static_cast<int>(dim)})
    for (const bool norm_scale : {true, false}) {
      const auto scope = x.check.in(fmt::format("rank {}, {}", rank, norm_scale ? "scaled" : "not scaled"));
      ListMemory memory, start;
      const IndexList list = memory.empty({rows, kv_heads, rank}),
                      list_there = x.place.put(start.empty({rows, kv_heads, rank}));
      Numbers<3> vectors(x, {rows, kv_heads, dim});
      const auto vectors_there = x.place.unwritten(vectors.own().extent);
      ops::large_channels(x.there, queries_there, rank, norm_scale, list_there, vectors_there, s);
      ops::large_channels_reference(x.kv, queries.view(), rank, norm_scale, list, vectors.own());
      x.check.equal("channels", x.place.get(list_there.index), memory.index);
      x.check.equal("numbers of channels", x.place.get(list_there.count), memory.count);
      x.check.equal("vectors", x.place.get(vectors_there), Guarded<3>::copy(vectors.view()), 1e-6);
      Numbers<3> own(x, {rows, x.c.heads(), dim});
      const auto own_there = x.place.unwritten(own.own().extent);
      ops::large_channels(x.there, queries_there, rank, norm_scale, list_there, own_there, s);
      ops::large_channels_reference(x.kv, queries.view(), rank, norm_scale, list, own.own());
      x.check.equal("vectors of query heads", x.place.get(own_there), Guarded<3>::copy(own.view()), 1e-6);
      for (const int newest : {0, 2}) {
        const Guarded<3> each({rows, x.c.heads(), x.c.room()}), sum({rows, kv_heads, x.c.room()});
        const auto each_there = x.place.put(each.view()), sum_there = x.place.put(sum.view());
        ops::channel_dot(x.there, own_there, list_there, there, newest, sum_there, s, each_there);
        ops::channel_dot_reference(x.kv, own.view(), list, channels.view, newest, sum.view(), each.view());
        x.check.equal(fmt::format("products of query heads, {} newest", newest), x.place.get(each_there), each.values(),
                      Tolerance{}.score);
        x.check.equal(fmt::format("their sums, {} newest", newest), x.place.get(sum_there), sum.values(),
                      Tolerance{}.score);
      }
      for (const std::int64_t room : {x.c.room(), (x.c.room() + 3) / 4 * 4})
        for (const int newest : {0, 2})
          x.same<3>(
              fmt::format("channel_dot, {} newest", newest), Guarded<3>({rows, kv_heads, room}).view(),
              Tolerance{}.score,
              [&](Scores out) { ops::channel_dot(x.there, vectors.put(), list_there, there, newest, out, s); },
              [&](Scores out) { ops::channel_dot_reference(x.kv, vectors.view(), list, channels.view, newest, out); });
    }
}

// Rows of several blocks and rounds of a kernel.
void check_long_rows(Place& place, Check& check) {
  PagedOptions o;
  o.rows = 2, o.kv_heads = 32, o.head_dim = 64, o.page_size = 16, o.max_pages = 40, o.dtype = DType::bf16;
  PagedFixture cache(o);
  const std::int64_t dim = o.head_dim, room = std::int64_t{o.max_pages} * o.page_size, slots = o.rows,
                     heads = o.kv_heads, queries = 2 * heads;
  for (int r = 0; r < o.rows; ++r)
    for (int h = 0; h < o.kv_heads; ++h) {
      const std::vector<float> keys = normals(room * dim, static_cast<unsigned>(r * o.kv_heads + h));
      for (int t = 0; t < 600 + h; ++t) {
        const std::vector<float> key(keys.begin() + t * dim, keys.begin() + (t + 1) * dim);
        cache.append(r, h, key, key, t);
      }
    }
  const PagedKv kv = cache.view(), there = place.put(kv, cache.arena_bytes());
  const Stream s = place.stream();
  std::vector<std::uint8_t> code(static_cast<std::size_t>(slots * heads * room * dim / 2));
  std::vector<float> range(static_cast<std::size_t>(slots * heads * room * 2));
  const KeyCodes codes{View<std::uint8_t, 4>::dense(code.data(), {slots, heads, room, dim / 2}),
                       View<float, 4>::dense(range.data(), {slots, heads, room, 2})};
  const KeyCodes codes_there{place.put(codes.code), place.put(codes.range)};
  ops::code_keys(there, 1000, codes_there, s);
  ops::code_keys_reference(kv, 1000, codes);
  check.that("codes", place.get(codes_there.code) == code && place.get(codes_there.range) == range);

  std::mt19937 rng(1);
  ListMemory memory;
  const PageList pages{memory.choose_pages(cache, o, [&] { return rng() % 8 > 0; })};
  const PageList pages_there = place.put(pages);
  std::vector<float> values = normals(slots * queries * dim, 2);
  const auto vectors = View<const float, 3>::dense(values.data(), {slots, queries, dim});
  same<3>(
      place, check, "coded_row_dot", Guarded<3>({slots, queries, room}).view(), 2.1e-4,
      [&](Scores out) { ops::coded_row_dot(there, place.put(vectors), pages_there, codes_there, out, s); },
      [&](Scores out) { ops::coded_entry_dot_reference(kv, vectors, pages, kv.page_size, codes, out); });

  KeyChannels channels;
  channels.dtype = DType::bf16, channels.slots = slots, channels.kv_heads = heads, channels.head_dim = dim;
  channels.blocks = 3, channels.head_stride = 3 * dim * channels.channel_stride();
  channels.slot_stride = heads * channels.head_stride;
  std::vector<std::byte> bytes(static_cast<std::size_t>(slots * channels.slot_stride));
  KeyChannels channels_there = channels;
  channels.data = bytes.data(), channels_there.data = place.put(bytes);
  for (const int newest : {130, 1000}) {
    ops::copy_channels(there, newest, channels_there, s);
    ops::copy_channels_reference(kv, newest, channels);
    check.that("keys by channel", place.get(View<const std::byte, 1>::dense(channels_there.data,
                                                                            {slots * channels.slot_stride})) == bytes);
  }
  ListMemory large;
  const IndexList list = large.empty({slots, heads, 12});
  std::vector<float> sums(static_cast<std::size_t>(slots * heads * dim));
  const auto sum = View<float, 3>::dense(sums.data(), {slots, heads, dim});
  ops::large_channels_reference(kv, vectors, 12, true, list, sum);
  same<3>(
      place, check, "channel_dot", Guarded<3>({slots, heads, room}).view(), Tolerance{}.score,
      [&](Scores out) { ops::channel_dot(there, place.put(sum), place.put(list), channels_there, 300, out, s); },
      [&](Scores out) { ops::channel_dot_reference(kv, sum, list, channels, 300, out); });
}

// More candidates than threads, and so many near the threshold that they have no room beside it.
void check_many_candidates(Place& place, Check& check) {
  constexpr int page = 16, tokens = 3000, entries = (tokens + page - 1) / page * page;
  const LengthsOnly lengths(1, 1, page, {tokens});
  const PagedKv kv = lengths.view(), there = place.put(kv, LengthsOnly::bytes());
  ListMemory memory;
  const PageList pages{memory.empty({1, 1, entries / page})};
  for (int i = pages.count(0, 0) = entries / page; i-- > 0;) pages.index(0, 0, i) = i;
  const PageList pages_there = place.put(pages);
  for (const float spread : {.01f, 3.f}) {
    std::vector<float> values = normals(2 * entries, 3);
    for (int i = 0; i < 2 * entries; ++i)
      values[static_cast<std::size_t>(i)] =
          i % entries < tokens ? spread * values[static_cast<std::size_t>(i)] : -infinity;
    const auto logits = View<const float, 3>::dense(values.data(), {1, 2, entries});
    for (const double p : {.2, .9}) {
      const auto scope = check.in(fmt::format("a share of {}, spread {}", p, spread));
      std::vector<std::int32_t> index[2], count[2];
      for (const bool greater : {false, true}) {
        ListMemory own;
        const TokenList list{own.empty({1, 1, tokens})};
        ops::top_p_entries_reference(kv, logits, pages, page, 1, p + (greater ? 1e-6 : -1e-6), 700, list);
        index[greater] = own.index, count[greater] = own.count;
      }
      ListMemory start;
      const TokenList list{place.put(start.empty({1, 1, tokens}))};
      ops::top_p_candidates(there, place.put(logits), pages_there, 1, static_cast<float>(p), 700, list, place.stream());
      const std::vector<std::int32_t> got = place.get(list.index);
      const auto end = got.begin() + place.get(list.count)[0];
      check.that("ascends", std::adjacent_find(got.begin(), end, std::greater_equal<>()) == end);
      check.that("holds the tokens of a smaller share",
                 std::includes(got.begin(), end, index[0].begin(), index[0].begin() + count[0][0]));
      check.that("holds only tokens of a larger share",
                 std::includes(index[1].begin(), index[1].begin() + count[1][0], got.begin(), end));
    }
  }
}

std::vector<Case> list() {
  return {on_caches("key copies", "codes of ragged rows", 36, check_codes),
          on_caches("key copies", "candidates of a share", 36, check_top_p_of_pages),
          on_caches("key copies", "listed tokens of a share", 36, check_top_p_of_tokens),
          on_caches("key copies", "keys by channel", 36, check_channels),
          checked("key copies", "long rows", check_long_rows),
          checked("key copies", "many candidates", check_many_candidates)};
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
