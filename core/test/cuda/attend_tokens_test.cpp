// attend on CUDA over lists of tokens.
#include <catch2/catch.hpp>
#include <limits>

#include "cases/paged_fixture.hpp"
#include "cases/place.hpp"
#include "cases/relative_error.hpp"
#include "ops/attend/attend.hpp"

using namespace kvlab;
using namespace kvlab::cases;

TEST_CASE("cuda attend: a list of all tokens is no list, and what no list may say is left out") {
  PagedOptions o;
  o.rows = 2, o.kv_heads = 2, o.head_dim = 64, o.page_size = 5, o.max_pages = 80, o.dtype = DType::bf16;
  PagedFixture cache(o);
  std::mt19937 rng(9);
  for (int r = 0; r < 2; ++r)
    for (int h = 0; h < 2; ++h) cache.fill_random(r, h, 390 - 100 * r - 7 * h, rng);
  const std::vector<float> q = normals(2 * 6 * 64, 9);
  std::vector<std::int32_t> index(2 * 2 * 402), count;
  const TokenList list{
      {View<std::int32_t, 3>::dense(index.data(), {2, 2, 402}), View<std::int32_t, 2>::dense(nullptr, {2, 2})}};
  for (int r = 0; r < 2; ++r)
    for (int h = 0; h < 2; ++h) {
      const int n = cache.view().tokens(r, h);
      for (int t = 0; t < 402; ++t) list.index(r, h, t) = t < n ? t : t % 2 ? -t : 100000 * t;
      count.push_back(n + 9 * r);
    }
  OnDevice device;
  ops::AttendArgs a;
  a.kv = device.put(cache.view(), cache.arena_bytes());
  a.queries = device.put(View<const float, 3>::dense(q.data(), {2, 6, 64}));
  const std::vector<float> poison(2 * 6 * 64, std::numeric_limits<float>::quiet_NaN());
  a.out = device.put(View<float, 3>::dense(const_cast<float*>(poison.data()), {2, 6, 64}));
  HeapWorkspace unused;
  ops::attend(a, unused, device.stream());
  const std::vector<float> all = device.get(a.out);
  const auto given = [&](const std::vector<std::int32_t>& counts) {
    TokenList there{{device.put(list.index), View<std::int32_t, 2>::dense(device.put(counts.data(), 4), {2, 2})}};
    a.tokens = &there;
    a.out = device.put(View<float, 3>::dense(const_cast<float*>(poison.data()), {2, 6, 64}));
    ops::attend(a, unused, device.stream());
    const std::vector<float> got = device.get(a.out);
    a.tokens = nullptr;
    return got;
  };
  // The kernel of these pages works in f32. That of lists rounds queries and shares to bf16.
  CHECK(relative(given(count), all) < 6e-3);
  CHECK(relative(given({1 << 30, 402, 400, 5000}), all) < 6e-3);
  const std::vector<float> none = given({0, -1, -(1 << 30), 0});
  CHECK(none == std::vector<float>(none.size(), 0.f));
  const PageList pages{list};
  a.tokens = &list, a.pages = &pages;
  CHECK_THROWS_WITH(ops::attend(a, unused, device.stream()), Catch::Contains("one of the two"));
}
