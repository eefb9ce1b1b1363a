// What attention leaves out: means of values, shares of listed tokens, and outputs that both fill.
#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "cases/numbers.hpp"
#include "cases/on_caches.hpp"
#include "ops/attend/left_out.hpp"

namespace kvlab::cases {
namespace {

void check_means(OnCache& x) {
  const std::int64_t slots = x.kv.length.extent[0];
  Numbers<3> start(x, {slots, x.kv.kv_heads, x.kv.head_dim});
  for (const int newest : {0, 1, 5, 70, 1000})
    x.same<3>(
        fmt::format("add_mean_value of {} newest", newest), start.own(), 1e-6,
        [&](View<float, 3> mean) { ops::add_mean_value(x.there, newest, mean, x.stream()); },
        [&](View<float, 3> mean) { ops::add_mean_value_reference(x.kv, newest, mean); });
}

void check_shares(OnCache& x) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  Numbers<3> scores(x, {x.c.rows(), x.c.heads(), x.c.room()}, x.n % 3 ? 3 : 40);
  if (x.n % 4 == 1)
    for (std::int64_t t = 0; t < x.c.room(); ++t) scores.own()(0, 0, t) = t % 2 ? -infinity : std::nanf("");
  if (x.n % 4 == 2) scores.own()(0, 0, 0) = std::nanf("");
  ListMemory memory;
  const bool all = x.n % 5 == 0;
  const TokenList list{memory.choose(
      x.c.cache.options(), static_cast<int>(x.c.room()), [&](int r, int h) { return x.kv.tokens(r, h); },
      [&] { return all || x.c.rng() % 3 == 0; })};
  const TokenList there = x.place.put(list);
  const auto scores_there = scores.put();
  x.same<2>(
      "listed_share", Guarded<2>({x.c.rows(), x.c.heads()}).view(), all ? 1e-9 : 1e-6,
      [&](View<float, 2> share) { ops::listed_share(x.there, scores_there, there, share, x.stream()); },
      [&](View<float, 2> share) { ops::listed_share_reference(x.kv, scores.view(), list, share); });
}

void check_blends(OnCache& x) {
  const std::int64_t slots = x.kv.length.extent[0], rows = x.c.rows(), heads = x.c.heads(), dim = x.kv.head_dim;
  Numbers<3> mean(x, {slots, x.kv.kv_heads, dim}), out(x, {rows, heads, dim});
  std::vector<float> shares;
  for (std::int64_t i = 0; i < rows * heads; ++i)
    shares.push_back(i % 3 == 0 ? 1.f : static_cast<float>(x.c.rng() % 1000) / 1000);
  const auto share = View<const float, 2>::dense(shares.data(), {rows, heads});
  const LeftOut there{x.place.put(share), mean.put()};
  const auto out_there = x.place.put(out.own());
  const bool rounds = x.stream().device() == Device::cuda && x.kv.layouts[0].dtype == DType::bf16;
  void* rounded = rounds ? put_as(x.place, Guarded<3>::copy(out.own()), DType::bf16) : nullptr;
  ops::blend_left_out(x.there, there, out_there, rounded, x.stream());
  ops::blend_left_out_reference(x.kv, {share, mean.view()}, out.own());
  std::vector<float> got = x.place.get(out_there);
  x.check.equal("blend_left_out", got, Guarded<3>::copy(out.own()), 1e-6);
  if (!rounds) return;
  for (float& y : got) y = stored(y, DType::bf16);
  x.check.that("the rounded output is the output, rounded",
               get_as(x.place, rounded, DType::bf16, std::ssize(got)) == got);
}

std::vector<Case> list() {
  return {on_caches("left_out", "means of values", 36, check_means),
          on_caches("left_out", "shares of lists", 36, check_shares),
          on_caches("left_out", "outputs that are filled", 24, check_blends)};
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
