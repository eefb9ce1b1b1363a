#include "ops/score/verify.hpp"

#include <catch2/catch.hpp>
#include <limits>

#include "cases/paged_fixture.hpp"

using namespace kvlab;
using namespace kvlab::cases;

TEST_CASE("find_nan counts cached tokens alone and names the lowest layer, KV head and text position") {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  PagedOptions o;
  o.rows = 2, o.kv_heads = 2;
  PagedFixture cache(o);
  const std::vector<float> x(16, 1.f);
  for (const int position : {40, 10, 30}) cache.append(1, 1, x, x, position);
  cache.append(0, 0, x, x, 7);
  const PagedKv kv = cache.view();
  std::vector<float> memory(2 * 2 * 5, nan);  // NaN behind the tokens, too
  const auto scores = View<float, 3>::dense(memory.data(), {2, 2, 5});
  ops::Finding found;
  scores(0, 0, 0) = inf;
  for (int t = 0; t < 3; ++t) scores(1, 1, t) = -inf;
  ops::find_nan(kv, 3, scores, &found, Stream::cpu());
  CHECK(found.count == 0);
  CHECK(found.first == 0);
  scores(1, 1, 0) = scores(1, 1, 2) = nan;
  ops::find_nan(kv, 3, scores, &found, Stream::cpu());
  CHECK(found.count == 2);
  CHECK((found.layer() == 3 && found.kv_head() == 1 && found.number() == 30));
  scores(0, 0, 0) = nan;
  ops::find_nan(kv, 3, scores, &found, Stream::cpu());
  CHECK(found.count == 5);
  CHECK((found.layer() == 3 && found.kv_head() == 0 && found.number() == 7));
  ops::find_nan(kv, 4, scores, &found, Stream::cpu());
  CHECK((found.count == 8 && found.layer() == 3));
}

TEST_CASE("find_keep names a count that its head cannot keep, and sums those of a row's layers since the first") {
  std::vector<std::int32_t> keep{5, 0, 7, 2}, length{5, 3, 9, 2}, total{3, 2};
  std::vector<std::int64_t> kept{99, 99};
  const Pins pins[] = {{1, 0}, {0, 0}};
  Allotment a;
  a.layers = 2;
  a.keep = View<std::int32_t, 2>::dense(keep.data(), {2, 2});
  a.length = View<const std::int32_t, 2>::dense(length.data(), {2, 2});
  a.total = total.data();
  ops::Finding found;
  ops::find_keep(a, kept.data(), &found, Stream::cpu());
  CHECK((found.count == 0 && found.first == 0 && found.over == 0));
  CHECK(kept == std::vector<std::int64_t>{5, 9});
  a.layer = 1;
  keep = {6, 3, -1, 2};
  ops::find_keep(a, kept.data(), &found, Stream::cpu());
  CHECK(kept == std::vector<std::int64_t>{14, 10});
  CHECK(found.count == 2);
  CHECK((found.layer() == 1 && found.kv_head() == 0 && found.number() == 6));
  CHECK(found.over == 0);  // at most 4 x (3 + 1) and 4 x (2 + 1)
  keep[0] = 5;
  LayerKv kv;
  kv.layer = 9;  // index in the model; a.layer counts from the first divided layer
  a.kv = &kv;
  found = {};
  ops::find_keep(a, kept.data(), &found, Stream::cpu());
  CHECK((found.count == 1 && found.layer() == 9 && found.number() == -1));
  CHECK(kept == std::vector<std::int64_t>{22, 11});
  CHECK((found.over > 0 && found.kept() == 22 && found.total() == 12));
  a.pins = pins;  // pins raise the bound to 4 x (3 + 1 + 1) = 20, still below 22
  keep = {0, 0, 2, 0};
  found = {};
  ops::find_keep(a, kept.data(), &found, Stream::cpu());
  CHECK(kept == std::vector<std::int64_t>{22, 13});
  CHECK((found.kept() == 22 && found.total() == 12));  // those of the row that keeps most
  keep = {-2, 0, 0, 0};
  found = {};
  ops::find_keep(a, kept.data(), &found, Stream::cpu());
  CHECK((kept[0] == 20 && found.kept() == 13 && found.total() == 8));
}
