#include "ops/attend.hpp"

#include <catch2/catch.hpp>
#include <limits>

#include "base/half.hpp"
#include "support/device_cache.hpp"
#include "support/paged_fixture.hpp"
#include "support/quick.hpp"
#include "support/relative_error.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

struct Case {
  PagedOptions options;
  int group = 1;
  std::vector<int> lengths;  // [row, kv_head], cycled
  bool listed = false;
  double tokens = -1;  // share of its tokens that a head's list has; -1 = no list of tokens
  int window = 0;
  bool half = false;    // the device has the same cache as f16, which the reference does not read
  bool ordered = true;  // else the newest half of a head's tokens lies in front of the oldest, as after evictions
};

std::vector<float> normals(int n, std::mt19937& rng) {
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& e : x) e = normal(rng);
  return x;
}

void compare(const Case& c, unsigned seed, int repeats = 1) {
  const PagedOptions& o = c.options;
  PagedFixture cache(o);
  std::mt19937 rng(seed);
  int tokens = 0;
  for (int r = 0; r < o.rows; ++r)
    for (int h = 0; h < o.kv_heads; ++h) {
      const int n = c.lengths[static_cast<std::size_t>(r * o.kv_heads + h) % c.lengths.size()];
      if (c.ordered)
        cache.fill_random(r, h, n, rng);
      else
        for (int t = 0; t < n; ++t)
          cache.append(r, h, normals(o.head_dim, rng), normals(o.head_dim, rng), 3 * (t < n / 2 ? n + t : t));
      tokens = std::max(tokens, n);
    }
  const int heads = o.kv_heads * c.group;
  std::normal_distribution<float> normal;
  std::vector<float> q(static_cast<std::size_t>(o.rows * heads * o.head_dim));
  for (float& x : q) x = static_cast<float>(bf16(2 * normal(rng)));
  std::vector<std::int32_t> last(static_cast<std::size_t>(o.rows)), index, count;
  for (int r = 0; r < o.rows; ++r)
    last[static_cast<std::size_t>(r)] =
        std::max(0, c.lengths[static_cast<std::size_t>(r * o.kv_heads) % c.lengths.size()] - 1);
  PageList pages;
  if (c.listed) {
    index.assign(static_cast<std::size_t>(o.rows * o.kv_heads * o.max_pages), -7);
    count.assign(static_cast<std::size_t>(o.rows * o.kv_heads), 0);
    pages.index = View<std::int32_t, 3>::dense(index.data(), {o.rows, o.kv_heads, o.max_pages});
    pages.count = View<std::int32_t, 2>::dense(count.data(), {o.rows, o.kv_heads});
    for (int r = 0; r < o.rows; ++r)
      for (int h = 0; h < o.kv_heads; ++h)
        for (int p = 0; p < cache.view().pages(r, h); ++p)
          if (rng() % 3) pages.index(r, h, pages.count(r, h)++) = p;
  }
  TokenList listed;
  if (c.tokens >= 0) {
    const int room = std::max(1, tokens);
    index.assign(static_cast<std::size_t>(o.rows * o.kv_heads * room), -7);
    count.assign(static_cast<std::size_t>(o.rows * o.kv_heads), 0);
    listed.index = View<std::int32_t, 3>::dense(index.data(), {o.rows, o.kv_heads, room});
    listed.count = View<std::int32_t, 2>::dense(count.data(), {o.rows, o.kv_heads});
    std::uniform_real_distribution<double> share;
    for (int r = 0; r < o.rows; ++r)
      for (int h = 0; h < o.kv_heads; ++h)
        for (int t = 0; t < cache.view().tokens(r, h); ++t)
          if (share(rng) < c.tokens) listed.index(r, h, listed.count(r, h)++) = t;
  }
  Guarded<3> out({o.rows, heads, o.head_dim}), mass({o.rows, heads, tokens + 5});
  Guarded<2> lse({o.rows, heads});
  ops::AttendArgs a;
  a.kv = cache.view();
  a.queries = View<const float, 3>::dense(q.data(), {o.rows, heads, o.head_dim});
  a.pages = c.listed ? &pages : nullptr;
  a.tokens = c.tokens >= 0 ? &listed : nullptr;
  a.window = c.window;
  a.last = last.data();
  a.out = out.view();
  a.lse = lse.view();
  a.mass = mass.view();
  ops::attend_reference(a);

  if (c.half) cache.to_half();
  OnDevice device;
  ops::AttendArgs b = a;
  b.kv = device.put(cache.view(), cache.arena_bytes());
  b.queries = device.put(a.queries);
  PageList device_pages;
  if (c.listed) b.pages = &(device_pages = device.put(pages));
  TokenList device_tokens;
  if (c.tokens >= 0) b.tokens = &(device_tokens = device.put(listed));
  b.last = device.put(last.data(), last.size());
  const std::vector<float> expected = out.values(), expected_lse = lse.values(), expected_mass = mass.values();
  const auto poison = [](std::size_t n) { return std::vector<float>(n, std::numeric_limits<float>::quiet_NaN()); };
  const auto nan_out = poison(expected.size()), nan_lse = poison(expected_lse.size()),
             nan_mass = poison(expected_mass.size());
  const std::vector<std::uint16_t> not_written(expected.size(), 0xffff);
  HeapWorkspace unused;
  for (const bool with_mass : {false, true}) {
    CAPTURE(with_mass);
    b.out = device.put(View<float, 3>::dense(const_cast<float*>(nan_out.data()), {o.rows, heads, o.head_dim}));
    b.lse = device.put(View<float, 2>::dense(const_cast<float*>(nan_lse.data()), {o.rows, heads}));
    b.mass = with_mass
                 ? device.put(View<float, 3>::dense(const_cast<float*>(nan_mass.data()), {o.rows, heads, tokens + 5}))
                 : View<float, 3>{};
    if (o.dtype == DType::bf16) b.rounded = device.put(not_written.data(), not_written.size());
    ops::attend(b, unused, device.stream());
    const std::vector<float> got = device.get(b.out), got_lse = device.get(b.lse);
    CHECK(relative(got, expected) < 6e-3);
    if (b.rounded) {
      std::vector<std::uint16_t> wanted;
      for (const float x : got) wanted.push_back(c.half ? float_to_half(x) : bf16(x).bits);
      CHECK(device.get(View<std::uint16_t, 1>::dense(static_cast<std::uint16_t*>(b.rounded),
                                                     {static_cast<std::int64_t>(wanted.size())})) == wanted);
    }
    double worst = 0;
    for (std::size_t i = 0; i < expected_lse.size(); ++i)
      if (got_lse[i] != expected_lse[i]) {
        const double difference = std::abs(double{got_lse[i]} - expected_lse[i]);
        worst = std::isfinite(difference) ? std::max(worst, difference) : 1e30;
      }
    // Keys that were turned are rounded once more than the reference's.
    CHECK(worst < (o.rope == RopeRegime::cache_relative ? 8e-3 : 2e-3));
    if (with_mass) CHECK(relative(device.get(b.mass), expected_mass) < 6e-3);
    for (int i = 0; i < repeats; ++i) {  // which finds the scratch as the run before left it
      ops::attend(b, unused, device.stream());
      CHECK(device.get(b.out) == got);
      CHECK(device.get(b.lse) == got_lse);
    }
  }
}

}  // namespace

TEST_CASE("cuda attend equals the reference for every head size, page size, group and length") {
  unsigned seed = 1;
  for (const int dim : {64, 96, 128, 256})
    for (const int page : {8, 16, 32, 64})
      for (const int group : {1, 4, 7, 16}) {
        CAPTURE(dim, page, group);
        Case c;
        c.options.rows = 3, c.options.kv_heads = 2, c.options.head_dim = dim, c.options.page_size = page;
        c.options.max_pages = 700 / page + 1, c.options.dtype = DType::bf16;
        c.group = group;
        c.lengths = {700, 1, 17, 0, 333, 64};
        compare(c, seed++);
        c.listed = true;
        compare(c, seed++);
        c.listed = false, c.window = 50;
        compare(c, seed++);
      }
}

TEST_CASE("cuda attend: keys that are turned by their ranks on reading") {
  unsigned seed = 200;
  for (const int dim : {64, 128, 256})
    for (const int page : {8, 16, 64})
      for (const int group : {3, 16}) {
        if (quick() && (page == 64) != (group == 16)) continue;
        CAPTURE(dim, page, group);
        Case c;
        c.options.rows = 2, c.options.kv_heads = 2, c.options.head_dim = dim, c.options.page_size = page;
        c.options.max_pages = 400 / page + 1, c.options.dtype = DType::bf16;
        c.options.rope = RopeRegime::cache_relative;
        c.group = group;
        c.lengths = {390, 1, 0, 145};
        for (const bool ordered : {true, false}) {
          c.ordered = ordered;
          compare(c, seed++);
        }
        c.listed = true;
        compare(c, seed++);
      }
}

TEST_CASE("cuda attend: f16, whichever kernel takes it") {
  unsigned seed = 250;
  for (const int dim : {64, 96, 128, 256, 80}) {  // the last by the kernel for caches of any kind
    CAPTURE(dim);
    Case c;
    c.half = true;
    c.options.rows = 3, c.options.kv_heads = 2, c.options.head_dim = dim, c.options.page_size = 16;
    c.options.max_pages = 25, c.options.dtype = DType::bf16;
    c.group = dim == 128 ? 11 : 3;
    c.lengths = {390, 1, 17, 0, 145, 64};
    compare(c, seed++);
    c.listed = true;
    compare(c, seed++);
    c.listed = false, c.window = 50;
    compare(c, seed++);
    if (dim % 64) continue;
    c.window = 0, c.options.rope = RopeRegime::cache_relative;
    compare(c, seed++);
  }
}

TEST_CASE("cuda attend: one long sequence is shared by all multiprocessors, many short ones share one") {
  Case c;
  c.options.kv_heads = 2, c.options.head_dim = 128, c.options.page_size = 16, c.options.max_pages = 600;
  c.options.dtype = DType::bf16;
  c.group = 4;
  c.lengths = {9500, 9473};
  compare(c, 77);
  c.options.rows = 300, c.options.kv_heads = 4, c.options.max_pages = 3;
  c.lengths = {5, 40, 16, 0, 33, 1, 48};
  compare(c, 78);
}

// Blocks share pairs, and one of them merges; which one comes last must not show.
TEST_CASE("cuda attend: the same bits however the blocks share the work") {
  const int spans = quick() ? 16 : 132;  // as many as there are multiprocessors, or more
  Case c;
  c.options.head_dim = 64, c.options.page_size = 16, c.options.dtype = DType::bf16;
  for (const auto& [units, pairs] : {std::pair{165, 3}, {170, 1}, {420, 7}}) {  // units of a span
    if (quick() && pairs != 3) continue;
    CAPTURE(units, pairs);
    const int tokens = units * 16 * spans / pairs;
    c.options.kv_heads = pairs, c.options.max_pages = tokens / 8;
    c.lengths.clear();
    for (int i = 0; i < pairs; ++i) c.lengths.push_back(tokens * (pairs + 1 + 2 * i) / (2 * pairs) - i);
    compare(c, 80, 3);
  }
}

TEST_CASE("cuda attend: fewer tokens than the multiprocessors could share") {
  Case c;
  c.options.kv_heads = 2, c.options.head_dim = 64, c.options.page_size = 16, c.options.max_pages = 8;
  c.options.dtype = DType::bf16;
  c.group = 2;
  for (const auto& lengths : std::vector<std::vector<int>>{{40, 1}, {17, 0}, {0, 100}, {33, 48}}) {
    CAPTURE(lengths);
    c.lengths = lengths;
    compare(c, 79);
  }
}

TEST_CASE("cuda attend takes caches of any kind") {
  for (unsigned n = 0; n < 24; ++n) {
    CAPTURE(n);
    RandomCache r(n);
    const PagedOptions& o = r.cache.options();
    const auto q = r.normal(std::int64_t{o.rows} * r.heads() * o.head_dim);
    Guarded<3> out({o.rows, r.heads(), o.head_dim});
    Guarded<2> lse({o.rows, r.heads()});
    ops::AttendArgs a;
    a.kv = r.cache.view();
    a.queries = View<const float, 3>::dense(q.data(), {o.rows, r.heads(), o.head_dim});
    a.out = out.view();
    a.lse = lse.view();
    ops::attend_reference(a);
    OnDevice device;
    ops::AttendArgs b = a;
    b.kv = device.put(r.cache.view(), r.cache.arena_bytes());
    b.queries = device.put(a.queries);
    b.out = device.put(a.out);
    b.lse = device.put(a.lse);
    HeapWorkspace unused;
    ops::attend(b, unused, device.stream());
    CHECK(relative(device.get(b.out), out.values()) < 6e-3);
  }
}

TEST_CASE("cuda attend takes caches of any kind in several parts, with lists, windows and the same bits again") {
  unsigned seed = 300;
  const CodecSpec plain, codes{{8}, {8}}, mixed{{0}, {8}};
  struct Kind {
    CodecSpec codec;
    DType dtype;
    int dim, page, group;
  };
  for (const Kind& k : {Kind{codes, DType::bf16, 128, 16, 4},
                        {mixed, DType::bf16, 72, 5, 3},
                        {plain, DType::f32, 256, 7, 1},
                        {codes, DType::bf16, 64, 16, 11},
                        {plain, DType::bf16, 96, 16, 2},
                        {mixed, DType::f32, 8, 4, 8}})
    for (const RopeRegime rope : {RopeRegime::original, RopeRegime::cache_relative}) {
      CAPTURE(seed, k.dim, k.page, k.group, static_cast<int>(rope));
      Case c;
      c.options.rows = 3, c.options.kv_heads = 2, c.options.head_dim = k.dim, c.options.page_size = k.page;
      c.options.max_pages = 900 / k.page + 1, c.options.dtype = k.dtype, c.options.codec = k.codec;
      c.options.rope = rope;
      c.group = k.group;
      c.lengths = {900, 1, 257, 0, 512, 33};
      for (const bool ordered : {true, false}) {
        c.ordered = ordered;
        compare(c, seed++);
      }
      c.listed = true;
      compare(c, seed++);
      c.window = 300;
      compare(c, seed++);
    }
}

TEST_CASE("cuda attend over lists of tokens equals the reference") {
  unsigned seed = 500;
  const CodecSpec plain, codes{{8}, {8}}, mixed{{0}, {8}}, keys{{8}, {0}};
  struct Kind {
    CodecSpec codec;
    DType dtype;
    int dim, page, group;
  };
  for (const Kind& k : {Kind{plain, DType::bf16, 128, 16, 4},
                        {plain, DType::f16, 64, 16, 16},
                        {codes, DType::bf16, 128, 16, 8},
                        {codes, DType::f16, 96, 5, 2},
                        {mixed, DType::bf16, 72, 5, 3},
                        {keys, DType::bf16, 64, 16, 11},
                        {plain, DType::f32, 256, 5, 1}})
    for (const RopeRegime rope : {RopeRegime::original, RopeRegime::cache_relative}) {
      CAPTURE(seed, k.dim, k.page, k.group, static_cast<int>(rope));
      Case c;
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
        compare(c, seed++);
      }
      c.tokens = 0.6, c.window = 300;
      compare(c, seed++);
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
