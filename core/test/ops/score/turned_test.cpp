// Heads whose query turned, by an injected share.
#include "ops/score/turned.hpp"

#include <kvlab/ops.hpp>

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <vector>

#include "cases/paged_fixture.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

constexpr int rows = 3, kv_heads = 2, group = 2, dim = 16, calls = 400;

// Counts the heads that turn in `calls` calls. `known`: there are last queries before the first call.
int turned(std::int32_t share, float threshold, bool known = true, std::vector<std::uint32_t> sequence = {4, 5, 6},
           std::vector<std::uint8_t>* all = nullptr) {
  PagedOptions o;
  o.rows = rows, o.kv_heads = kv_heads, o.head_dim = dim;
  PagedFixture cache(o);
  PagedKv kv = cache.view();
  const std::vector<float> q(rows * kv_heads * group * dim, 1);
  std::vector<float> last(q.size(), known ? 1.f : 0.f);
  std::vector<std::uint8_t> flags(rows * kv_heads);
  std::vector<std::uint32_t> count(rows);
  ops::InjectedTurns turns{share, sequence.data(), View<std::uint32_t, 1>::dense(count.data(), {rows}), 1, 9};
  ops::InjectedUse used;
  const ops::Injected injected{nullptr, &turns, &used};
  kv.injected = &injected;
  int out = 0;
  for (int i = 0; i < calls; ++i) {
    ops::turned_heads(View<const float, 3>::dense(q.data(), {rows, kv_heads * group, dim}), kv,
                      View<float, 3>::dense(last.data(), {rows, kv_heads * group, dim}), threshold,
                      HeadFlags::dense(flags.data(), {rows, kv_heads}), Stream::cpu());
    for (const auto f : flags) out += f;
    if (all) all->insert(all->end(), flags.begin(), flags.end());
  }
  CHECK(used.turns);
  return out;
}

}  // namespace

TEST_CASE("an injected share of heads turns, whatever the queries") {
  constexpr int all = rows * kv_heads * calls;
  CHECK(turned(0, .9f) == 0);
  CHECK(turned(1'000'000, .9f) == all);
  for (const double share : {.05, .3, .8})
    CHECK(turned(static_cast<std::int32_t>(share * 1e6), .9f) / double{all} ==
          Approx(share).margin(4 * std::sqrt(share * (1 - share) / all)));
}

TEST_CASE("an injected turn needs a last query and a threshold") {
  CHECK(turned(0, .9f, false) == rows * kv_heads);  // the first call has no last query
  CHECK(turned(1'000'000, -std::numeric_limits<float>::infinity()) == 0);
}

TEST_CASE("injected turns follow the sequence, not the slot") {
  std::vector<std::uint8_t> one, other;
  turned(500'000, .9f, true, {4, 5, 6}, &one);
  turned(500'000, .9f, true, {6, 4, 5}, &other);
  const auto of_slot = [](const std::vector<std::uint8_t>& all, std::size_t slot) {
    std::vector<std::uint8_t> out;
    for (std::size_t i = 0; i < all.size(); ++i)
      if (i / kv_heads % rows == slot) out.push_back(all[i]);
    return out;
  };
  CHECK(of_slot(one, 0) == of_slot(other, 1));
  CHECK(of_slot(one, 1) == of_slot(other, 2));
  CHECK(of_slot(one, 2) == of_slot(other, 0));
  CHECK(of_slot(one, 0) != of_slot(one, 1));
}
