// test/ops/attend/attend_nonfinite_test.cpp for the kernels: the pipelined one and the general one.
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

#include "support/cuda_attend.hpp"

using namespace kvlab;
using namespace kvlab::test;

TEST_CASE("cuda attend: a NaN key or value is NaN in the outputs that read it, and nowhere else") {
  constexpr int group = 3, kv_heads = 2, spoilt_head = 1, element = 7;
  struct Kind {
    int dim;
    bool mass;
  };
  for (const Kind& kind : {Kind{64, false}, Kind{128, true}, Kind{80, false}, Kind{80, true}})
    for (const int tokens : {1, 21, 600})
      for (const int spoilt : {0, tokens / 2, tokens - 1, -1})  // -1: all of them
        for (const KvSide side : {KvSide::key, KvSide::value}) {
          CAPTURE(kind.dim, kind.mass, tokens, spoilt, static_cast<int>(side));
          PagedOptions o;
          o.kv_heads = kv_heads, o.head_dim = kind.dim, o.page_size = 16, o.max_pages = 40, o.dtype = DType::bf16;
          PagedFixture cache(o);
          std::mt19937 rng(3);
          for (int h = 0; h < kv_heads; ++h)
            for (int t = 0; t < tokens; ++t) {
              std::vector<float> k = normals(kind.dim, rng), v = normals(kind.dim, rng);
              if (h == spoilt_head && (spoilt < 0 || spoilt == t))
                (side == KvSide::key ? k : v)[element] = std::numeric_limits<float>::quiet_NaN();
              cache.append(0, h, k, v);
            }
          const int heads = kv_heads * group;
          const auto q = normals(heads * kind.dim, rng);
          const std::vector<float> zero(q.size()), zero_mass(static_cast<std::size_t>(heads * tokens));
          const std::int32_t last[] = {tokens - 1};
          OnDevice device;
          ops::AttendArgs a;
          a.kv = device.put(cache.view(), cache.arena_bytes());
          a.queries = device.put(View<const float, 3>::dense(q.data(), {1, heads, kind.dim}));
          a.last = device.put(last, 1);
          a.out = device.put(View<float, 3>::dense(const_cast<float*>(zero.data()), {1, heads, kind.dim}));
          if (kind.mass)
            a.mass = device.put(View<float, 3>::dense(const_cast<float*>(zero_mass.data()), {1, heads, tokens}));
          HeapWorkspace unused;
          ops::attend(a, unused, device.stream());
          const std::vector<float> out = device.get(a.out);
          for (std::size_t i = 0; i < out.size(); ++i) {
            const auto head = i / static_cast<std::size_t>(kind.dim), d = i % static_cast<std::size_t>(kind.dim);
            const bool reads = head / group == spoilt_head && (side == KvSide::key || d == element);
            REQUIRE(std::isnan(out[i]) == reads);
          }
        }
}
