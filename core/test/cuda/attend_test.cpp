#include "ops/attend/attend.hpp"

#include <catch2/catch.hpp>

#include "cases/quick.hpp"
#include "support/cuda_attend.hpp"

using namespace kvlab;
using namespace kvlab::test;
using namespace kvlab::cases;

TEST_CASE("cuda attend equals the reference for every head size, page size, group and length") {
  unsigned seed = 1;
  for (const int dim : {64, 96, 128, 256})
    for (const int page : {8, 16, 32, 64})
      for (const int group : {1, 4, 7, 16}) {
        CAPTURE(dim, page, group);
        CudaAttendCase c;
        c.options.rows = 3, c.options.kv_heads = 2, c.options.head_dim = dim, c.options.page_size = page;
        c.options.max_pages = 700 / page + 1, c.options.dtype = DType::bf16;
        c.group = group;
        c.lengths = {700, 1, 17, 0, 333, 64};
        compare_with_reference(c, seed++);
        c.listed = true;
        compare_with_reference(c, seed++);
        c.listed = false, c.window = 50;
        compare_with_reference(c, seed++);
      }
}

TEST_CASE("cuda attend: keys that are turned by their ranks on reading") {
  unsigned seed = 200;
  for (const int dim : {64, 128, 256})
    for (const int page : {8, 16, 64})
      for (const int group : {3, 16}) {
        if (quick() && (page == 64) != (group == 16)) continue;
        CAPTURE(dim, page, group);
        CudaAttendCase c;
        c.options.rows = 2, c.options.kv_heads = 2, c.options.head_dim = dim, c.options.page_size = page;
        c.options.max_pages = 400 / page + 1, c.options.dtype = DType::bf16;
        c.options.rope = RopeRegime::cache_relative;
        c.group = group;
        c.lengths = {390, 1, 0, 145};
        for (const bool ordered : {true, false}) {
          c.ordered = ordered;
          compare_with_reference(c, seed++);
        }
        c.listed = true;
        c.attention_scale = 0.75f;
        compare_with_reference(c, seed++);
      }
}

TEST_CASE("cuda attend: f16, whichever kernel takes it") {
  unsigned seed = 250;
  for (const int dim : {64, 96, 128, 256, 80}) {  // the kernel for caches of any kind takes 80
    CAPTURE(dim);
    CudaAttendCase c;
    c.half = true;
    c.options.rows = 3, c.options.kv_heads = 2, c.options.head_dim = dim, c.options.page_size = 16;
    c.options.max_pages = 25, c.options.dtype = DType::bf16;
    c.group = dim == 128 ? 11 : 3;
    c.lengths = {390, 1, 17, 0, 145, 64};
    compare_with_reference(c, seed++);
    c.listed = true;
    compare_with_reference(c, seed++);
    c.listed = false, c.window = 50;
    compare_with_reference(c, seed++);
    if (dim % 64) continue;
    c.window = 0, c.options.rope = RopeRegime::cache_relative;
    compare_with_reference(c, seed++);
  }
}

TEST_CASE("cuda attend: one long sequence is shared by all multiprocessors, many short ones share one") {
  CudaAttendCase c;
  c.options.kv_heads = 2, c.options.head_dim = 128, c.options.page_size = 16, c.options.max_pages = 600;
  c.options.dtype = DType::bf16;
  c.group = 4;
  c.lengths = {9500, 9473};
  compare_with_reference(c, 77);
  c.options.rows = 300, c.options.kv_heads = 4, c.options.max_pages = 3;
  c.lengths = {5, 40, 16, 0, 33, 1, 48};
  compare_with_reference(c, 78);
}

// Blocks share pairs of row and KV head, and the last block to finish merges. Its choice must not change a bit.
TEST_CASE("cuda attend: the same bits however the blocks share the work") {
  const int spans = quick() ? 16 : 132;  // as many as there are multiprocessors, or more
  CudaAttendCase c;
  c.options.head_dim = 64, c.options.page_size = 16, c.options.dtype = DType::bf16;
  for (const auto& [units, pairs] : {std::pair{165, 3}, {170, 1}, {420, 7}}) {  // units of a span
    if (quick() && pairs != 3) continue;
    CAPTURE(units, pairs);
    const int tokens = units * 16 * spans / pairs;
    c.options.kv_heads = pairs, c.options.max_pages = tokens / 8;
    c.lengths.clear();
    for (int i = 0; i < pairs; ++i) c.lengths.push_back(tokens * (pairs + 1 + 2 * i) / (2 * pairs) - i);
    compare_with_reference(c, 80, 3);
  }
}

// Pairs of about equal length take whole blocks. The last blocks may have few units or none.
TEST_CASE("cuda attend: sequences of about the same length") {
  CudaAttendCase c;
  c.options.kv_heads = 2, c.options.head_dim = 128, c.options.page_size = 16, c.options.dtype = DType::bf16;
  c.group = 4;
  c.options.rows = 3;
  for (const auto& lengths : std::vector<std::vector<int>>{{2000, 2000}, {1601, 1590, 1570}, {270, 290}, {1, 2}}) {
    CAPTURE(lengths);
    c.lengths = lengths;
    c.options.max_pages = lengths[0] / 8 + 2;
    compare_with_reference(c, 83, 3);
  }
}

TEST_CASE("cuda attend: fewer tokens than the multiprocessors could share") {
  CudaAttendCase c;
  c.options.kv_heads = 2, c.options.head_dim = 64, c.options.page_size = 16, c.options.max_pages = 8;
  c.options.dtype = DType::bf16;
  c.group = 2;
  for (const auto& lengths : std::vector<std::vector<int>>{{40, 1}, {17, 0}, {0, 100}, {33, 48}}) {
    CAPTURE(lengths);
    c.lengths = lengths;
    compare_with_reference(c, 79);
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
      CudaAttendCase c;
      c.options.rows = 3, c.options.kv_heads = 2, c.options.head_dim = k.dim, c.options.page_size = k.page;
      c.options.max_pages = 900 / k.page + 1, c.options.dtype = k.dtype, c.options.codec = k.codec;
      c.options.rope = rope;
      if (rope == RopeRegime::cache_relative) c.attention_scale = 0.75f;
      c.group = k.group;
      c.lengths = {900, 1, 257, 0, 512, 33};
      for (const bool ordered : {true, false}) {
        c.ordered = ordered;
        compare_with_reference(c, seed++);
      }
      c.listed = true;
      compare_with_reference(c, seed++);
      c.window = 300;
      compare_with_reference(c, seed++);
    }
}
