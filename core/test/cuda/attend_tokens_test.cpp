// attend on CUDA over lists of tokens.
#include <catch2/catch.hpp>
#include <limits>

#include "cases/quick.hpp"
#include "support/cuda_attend.hpp"

using namespace kvlab;
using namespace kvlab::test;
using namespace kvlab::cases;

TEST_CASE("cuda attend over lists of tokens equals the reference") {
  unsigned seed = 500;
  const CodecSpec plain, codes{{8}, {8}}, mixed{{0}, {8}}, keys{{8}, {0}};
  struct Kind {
    CodecSpec codec;
    DType dtype;
    int dim, page, group;
  };
  for (const Kind& k : {Kind{plain, DType::bf16, 128, 16, 4},
                        {plain, DType::bf16, 64, 16, 16},
                        {codes, DType::bf16, 128, 16, 8},
                        {codes, DType::bf16, 96, 5, 2},
                        {mixed, DType::bf16, 72, 5, 3},
                        {keys, DType::bf16, 64, 16, 11},
                        {plain, DType::f32, 256, 5, 1}})
    for (const RopeRegime rope : {RopeRegime::original, RopeRegime::cache_relative}) {
      CAPTURE(seed, k.dim, k.page, k.group, static_cast<int>(rope));
      CudaAttendCase c;
      c.options.rows = 3, c.options.kv_heads = 2, c.options.head_dim = k.dim, c.options.page_size = k.page;
      c.options.max_pages = 900 / k.page + 1, c.options.dtype = k.dtype, c.options.codec = k.codec;
      c.options.rope = rope;
      c.group = k.group;
      c.lengths = {900, 1, 257, 0, 512, 33};
      for (const double share : {1.0, 0.4, 0.02, 0.0}) {
        if (quick() && share == 0.02 && rope == RopeRegime::original) continue;
        CAPTURE(share);
        c.tokens = share;
        c.ordered = share != 0.4;
        compare_with_reference(c, seed++);
      }
      c.tokens = 0.6, c.window = 300;
      c.half = k.dtype == DType::bf16 && k.codec.k.bits == 0 && k.codec.v.bits == 0;
      compare_with_reference(c, seed++);
    }
}

TEST_CASE("cuda attend: a list of all tokens is no list, and what no list may say is left out") {
  PagedOptions o;
  o.rows = 2, o.kv_heads = 2, o.head_dim = 64, o.page_size = 5, o.max_pages = 80, o.dtype = DType::bf16;
  PagedFixture cache(o);
  std::mt19937 rng(9);
  for (int r = 0; r < 2; ++r)
    for (int h = 0; h < 2; ++h) cache.fill_random(r, h, 390 - 100 * r - 7 * h, rng);
  const std::vector<float> q = normals(2 * 6 * 64, rng);
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
  CHECK(relative(given(count), all) < 1e-5);
  CHECK(relative(given({1 << 30, 402, 400, 5000}), all) < 1e-5);
  const std::vector<float> none = given({0, -1, -(1 << 30), 0});
  CHECK(none == std::vector<float>(none.size(), 0.f));
  const PageList pages{list};
  a.tokens = &list, a.pages = &pages;
  CHECK_THROWS_WITH(ops::attend(a, unused, device.stream()), Catch::Contains("one of the two"));
}
