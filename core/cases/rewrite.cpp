// Rows that Edits::rewrite stores: channels that become zeros, keys before RoPE, and rows of two layers that get one
// direction.
#include <fmt/format.h>
#include <kvlab/rewrite.hpp>

#include <limits>

#include "cases/on_caches.hpp"
#include "ops/score/reference.hpp"

namespace kvlab::cases {
namespace {

constexpr float nan = std::numeric_limits<float>::quiet_NaN();

void check_channels(OnCache& x) {
  const std::int64_t rows = x.c.rows(), heads = x.c.kv_heads(), room = x.c.room(), dim = x.kv.head_dim;
  const Stream s = x.stream();
  Numbers<4> keys(x, {rows, heads, room, dim});
  const auto keys_there = keys.put();
  for (const std::int64_t window : {1, 5, 32}) {
    Numbers<4> queries(x, {rows, x.c.heads(), window, dim});
    const auto queries_there = queries.put();
    x.same<3>(
        fmt::format("channel_energy of {} queries", window), Guarded<3>({rows, heads, dim}).view(), 1e-6,
        [&](View<float, 3> out) { ops::channel_energy(queries_there, x.there, keys_there, out, s); },
        [&](View<float, 3> out) { ops::channel_energy_reference(queries.view(), x.kv, keys.view(), out); });
  }
  Numbers<3> energy(x, {rows, heads, dim});
  for (std::int64_t d = 0; d + 2 < dim; d += 3) energy.own()(0, 0, d) = energy.own()(0, 0, d + 2);
  energy.own()(0, 0, 1) = energy.own()(0, 0, 5) = nan;
  const auto energy_there = energy.put();
  for (const int count : {0, 3, static_cast<int>(dim) / 2, static_cast<int>(dim)})
    for (const int newest : {0, 5, 1000})
      x.same<4>(
          fmt::format("zero_channels, {} of them but in the {} newest", count, newest), keys.own(), 0,
          [&](View<float, 4> out) { ops::zero_channels(x.there, energy_there, count, newest, out, s); },
          [&](View<float, 4> out) { ops::zero_channels_reference(x.kv, energy.view(), count, newest, out); });
}

void check_turns(OnCache& x) {
  Numbers<4> keys(x, {x.c.rows(), x.c.kv_heads(), x.c.room(), x.kv.head_dim});
  for (const float scale : {1.f, 1.25f})
    for (const auto way : {ops::RopeTurn::off, ops::RopeTurn::on}) {
      PagedKv kv = x.kv, there = x.there;
      kv.rope = there.rope = RopeRegime::original;
      kv.rope_table.attention_scale = there.rope_table.attention_scale = scale;
      const ops::RowRange range{{}, x.c.pick({0, 0, 7})};
      x.same<4>(
          fmt::format("turn_rows {} with scale {} from place {}", way == ops::RopeTurn::on ? "on" : "off", scale,
                      range.least),
          keys.own(), 2e-6, [&](View<float, 4> out) { ops::turn_rows(there, way, out, x.stream(), range); },
          [&](View<float, 4> out) { ops::turn_rows_reference(kv, way, out, range); });
    }
}

void check_layers(OnCache& x) {
  const std::int64_t rows = x.c.rows(), heads = x.c.kv_heads(), room = x.c.room(), dim = x.kv.head_dim;
  const Stream s = x.stream();
  Numbers<4> a(x, {rows, heads, room, dim}), b(x, {rows, heads, room, dim}, 3);
  // A row of zeros, rows that point alike, opposite ones, and some that nearly point alike.
  for (std::int64_t t = 0; t < room; ++t)
    for (std::int64_t d = 0; t % 3 == 1 && d < dim; ++d) {
      const float y = a.view()(0, 0, t, d);
      b.own()(0, 0, t, d) = t % 12 == 1 ? 0 : t % 12 == 4 ? 2 * y : t % 12 == 7 ? -2 * y : y + (d == 0 ? 1e-3f : 0);
    }
  const auto a_there = a.put(), b_there = b.put();
  x.same<3>(
      "row_distance", Guarded<3>({rows, heads, room}).view(), 1e-6,
      [&](Scores out) { ops::row_distance(x.there, a_there, b_there, out, s); },
      [&](Scores out) { ops::row_distance_reference(x.kv, a.view(), b.view(), out); });
  ListMemory memory;
  const TokenList exact{memory.choose(
      x.c.cache.options(), static_cast<int>(room), [&](int r, int h) { return x.kv.tokens(r, h); },
      [&] { return x.c.rng() % 5 == 0; })};
  const TokenList exact_there = x.place.put(exact);
  for (const float t : {0.f, .6f, 1.f}) {
    const auto scope = x.check.in(fmt::format("t = {}", t));
    for (const bool second : {false, true}) {
      const std::vector<float> other = Guarded<4>::copy((second ? a : b).own());
      x.same<4>(
          second ? "merge_rows, the second layer" : "merge_rows, the first layer", (second ? b : a).own(), 1e-5,
          [&](View<float, 4> own) {
            const View<float, 4> rest = x.place.put((second ? a : b).own());
            ops::merge_rows(x.there, t, exact_there, second ? rest : own, second ? own : rest, s);
          },
          [&](View<float, 4> own) {
            std::vector<float> copy = other;
            const auto rest = View<float, 4>::dense(copy.data(), own.extent);
            ops::merge_rows_reference(x.kv, t, exact, second ? rest : own, second ? own : rest);
          });
    }
  }
}

void check_copy(OnCache& x) {
  const std::int64_t rows = x.c.rows(), heads = x.c.kv_heads(), room = x.c.room(), dim = x.kv.head_dim;
  Numbers<4> from(x, {rows, heads, room, dim}), to(x, {rows, heads, room, dim});
  ListMemory memory;
  const TokenList some{memory.choose(
      x.c.cache.options(), static_cast<int>(room), [&](int r, int h) { return x.kv.tokens(r, h); },
      [&] { return x.c.rng() % 3 == 0; })};
  const TokenList there = x.place.put(some);
  const auto from_there = from.put();
  x.same<4>(
      "copy_rows", to.own(), 0,
      [&](View<float, 4> out) { ops::copy_rows(x.there, there, from_there, out, x.stream()); },
      [&](View<float, 4> out) { ops::copy_rows_reference(x.kv, some, from.view(), out); });
}

std::vector<Case> list() {
  return {on_caches("channels", "energies and zeros", 36, check_channels),
          on_caches("turn_rows", "keys before RoPE, and back", 36, check_turns),
          on_caches("merge_rows", "rows of two layers", 36, check_layers),
          on_caches("copy_rows", "of some tokens", 24, check_copy)};
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
