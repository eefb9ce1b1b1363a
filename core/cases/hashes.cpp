// Hashes of keys, the weights of tokens that a query samples by them, and attention with these as a bias.
#include <fmt/format.h>
#include <kvlab/ops.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cases/on_caches.hpp"
#include "cases/relative_error.hpp"
#include "ops/attend/attend.hpp"
#include "ops/select/hashes.hpp"
#include "store/workspace.hpp"

namespace kvlab::cases {
namespace {

// Hashes of every slot of a cache, all of them in vectors.
struct Hashes {
  std::vector<std::int16_t> code;
  std::vector<float> mean, planes;
  std::vector<std::int32_t> bound;
  KeyHashes view;

  Hashes(OnCache& x, const HashRule& rule)
      : code(static_cast<std::size_t>(heads(x) * x.c.room() * room_of(x, rule)), -7),
        mean(static_cast<std::size_t>(heads(x) * x.kv.head_dim), -7),
        planes(hash_planes(rule, 1, x.kv.kv_heads, x.kv.head_dim)),
        bound(static_cast<std::size_t>(heads(x) * 2), 0) {
    const std::int64_t slots = x.kv.length.extent[0], of_slot = x.kv.kv_heads, dim = x.kv.head_dim;
    view.code = View<std::int16_t, 4>::dense(code.data(), {slots, of_slot, x.c.room(), room_of(x, rule)});
    view.code.extent[3] = rule.tables;
    view.mean = View<float, 3>::dense(mean.data(), {slots, of_slot, dim});
    view.bound = View<std::int32_t, 3>::dense(bound.data(), {slots, of_slot, 2});
    view.planes = View<const float, 4>::dense(planes.data(), {of_slot, dim, rule.bits, rule.tables});
  }
  KeyHashes put(Place& place) const {
    KeyHashes there{place.put(whole(view.code)), place.put(view.mean), place.put(view.bound), place.put(view.planes)};
    there.code.extent[3] = view.code.extent[3];
    return there;
  }
  // With the room between tokens.
  static View<std::int16_t, 4> whole(View<std::int16_t, 4> codes) {
    codes.extent[3] = codes.stride[2];
    return codes;
  }
  // Numbers between tokens: KeptHashes has rows of whole 16 bytes.
  static std::int64_t room_of(const OnCache& x, const HashRule& rule) {
    return x.n % 2 ? rule.tables : (rule.tables + 7) / 8 * 8;
  }
  static std::int64_t heads(const OnCache& x) { return x.kv.length.extent[0] * x.kv.kv_heads; }
};

void check_hashes(OnCache& x) {
  x.kv.rope = x.there.rope = RopeRegime::original;  // keys count as they are stored
  const Stream s = x.stream();
  Ledger ledger;
  StoreWorkspace w(ledger, s);
  const HashRule rule{1 + static_cast<int>(x.c.rng() % 6), std::array{1, 3, 40, 130}[x.c.rng() % 4], x.c.rng()};
  const Hashes hashes(x, rule);
  const KeyHashes there = hashes.put(x.place);
  int shortest = std::numeric_limits<int>::max();
  for (int r = 0; r < x.kv.rows; ++r)
    for (int h = 0; h < x.kv.kv_heads; ++h) shortest = std::min(shortest, x.kv.tokens(r, h));
  for (const bool all : {true, false}) {  // the second call replaces what the first one left
    const int from = all ? 0 : static_cast<int>(x.c.rng() % static_cast<unsigned>(shortest + 1)),
              to = shortest - 2 * !all;
    const auto scope = x.check.in(fmt::format("{} bits, {} tables, places {} to {}", rule.bits, rule.tables, from, to));
    ops::hash_keys(x.there, from, to, there, s);
    ops::hash_keys_reference(x.kv, from, to, hashes.view);
    x.check.equal("bounds", x.place.get(there.bound), hashes.bound);
    x.check.equal("means", x.place.get(there.mean), hashes.mean, 0);
    x.check.that("codes", x.place.get(Hashes::whole(there.code)) == hashes.code);
    Numbers<3> queries(x, {x.c.rows(), x.c.heads(), x.kv.head_dim}), weights(x, {x.c.rows(), x.c.heads(), x.c.room()});
    const auto queries_there = queries.put();
    for (const int least : {1, 2, rule.tables}) {
      if (least > rule.tables) continue;
      const Collisions collisions{least, 1e-4f};
      x.same<3>(
          fmt::format("collision_weights, {} tables", least), weights.own(), 1e-5,
          [&](Scores out) { ops::collision_weights(x.there, queries_there, collisions, there, out, w, s); },
          [&](Scores out) { ops::collision_weights_reference(x.kv, queries.view(), collisions, hashes.view, out); });
    }
  }
}

// Attention with a bias, over a list and over all tokens, beside its reference.
void check_bias(OnCache& x) {
  const std::int64_t rows = x.c.rows(), heads = x.c.heads(), room = x.c.room();
  Numbers<3> queries(x, {rows, heads, x.kv.head_dim}), bias(x, {rows, heads, room}, 3);
  for (std::int64_t i = 0; i < rows * heads * room; ++i)
    if (x.c.rng() % 3 == 0) bias.own().data[i] = -std::numeric_limits<float>::infinity();
  if (x.n % 2)  // a query head that reads nothing
    std::fill_n(&bias.own()(0, 0, 0), room, -std::numeric_limits<float>::infinity());
  ListMemory memory;
  const TokenList list{memory.empty({rows, x.c.kv_heads(), room})};
  for (std::int64_t r = 0; r < rows; ++r)
    for (int h = 0; h < x.c.kv_heads(); ++h)
      for (int t = list.count(r, h) = 0; t < x.kv.tokens(static_cast<int>(r), h); ++t)
        if (x.c.rng() % 2) list.index(r, h, list.count(r, h)++) = t;
  const TokenList list_there = x.place.put(list);
  Ledger ledger;
  StoreWorkspace w(ledger, x.stream());
  for (const bool listed : {true, false}) {
    const auto scope = x.check.in(listed ? "a list" : "all tokens");
    Guarded<3> out({rows, heads, x.kv.head_dim});
    Guarded<2> lse({rows, heads});
    ops::AttendArgs a;
    a.kv = x.kv, a.queries = queries.view(), a.bias = bias.view(), a.out = out.view(), a.lse = lse.view();
    if (listed) a.tokens = &list;
    ops::attend_reference(a);
    a.kv = x.there, a.queries = queries.put(), a.bias = bias.put();
    if (listed) a.tokens = &list_there;
    a.out = x.place.unwritten(out.view().extent), a.lse = x.place.unwritten(lse.view().extent);
    ops::attend(a, w, x.stream());
    const bool cuda = x.stream().device() == Device::cuda;
    x.check.within("out", relative(x.place.get(a.out), out.values()), cuda ? 6e-3 : 1e-4);
    x.check.equal("lse", x.place.get(a.lse), lse.values(), cuda ? 8e-3 : 5e-5);
  }
}

std::vector<Case> list() {
  return {on_caches("hashes", "of ragged rows", 36, check_hashes),
          on_caches("hashes", "attention with a bias", 36, check_bias)};
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
