// A NaN or infinity that attention reads reaches its output: no shortcut of the softmax may hide it.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <random>

#include "base/buffer.hpp"
#include "cases/paged_fixture.hpp"
#include "ops/attend/attend_prompt.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();
constexpr int group = 3, kv_heads = 2, spoilt_head = 1;

std::vector<float> normals(int n, std::mt19937& rng) {
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& e : x) e = normal(rng);
  return x;
}

class Scratch final : public Workspace {
 public:
  void* scratch(const char*, std::size_t bytes) override {
    blocks_.emplace_back(std::max<std::size_t>(bytes, 1));
    return blocks_.back().as<>();
  }
  void* state(const char*, std::size_t, int) override { return nullptr; }

 private:
  std::vector<Buffer> blocks_;
};

}  // namespace

TEST_CASE("prompt attention: a NaN key or value is NaN in the outputs of the tokens that read it") {
  const int tokens = 70, heads = kv_heads * group;
  for (const bool bf16_products : {false, true})
    for (const int at : {0, 33, tokens - 1})
      for (const KvSide side : {KvSide::key, KvSide::value}) {
        CAPTURE(bf16_products, at, static_cast<int>(side));
        PagedOptions o;
        o.kv_heads = kv_heads, o.head_dim = 16, o.page_size = 4, o.max_pages = 200, o.dtype = DType::f32;
        PagedFixture cache(o);
        std::mt19937 rng(5);
        const auto q = normals(tokens * heads * 16, rng);
        auto k = normals(tokens * kv_heads * 16, rng), v = normals(tokens * kv_heads * 16, rng);
        (side == KvSide::key ? k : v)[static_cast<std::size_t>((at * kv_heads + spoilt_head) * 16 + 7)] = nan_value;
        std::vector<float> out(q.size()), mass(static_cast<std::size_t>(heads * tokens));
        ops::PromptArgs a;
        a.kv = cache.view();
        a.queries = View<const float, 3>::dense(q.data(), {tokens, heads, 16});
        a.keys = View<const float, 3>::dense(k.data(), {tokens, kv_heads, 16});
        a.values = View<const float, 3>::dense(v.data(), {tokens, kv_heads, 16});
        a.out = View<float, 3>::dense(out.data(), {tokens, heads, 16});
        a.sums = View<float, 2>::dense(mass.data(), {heads, tokens});
        a.round_to_bf16 = bf16_products;
        Scratch w;
        ops::attend_prompt(a, w, Stream::cpu());
        for (int t = 0; t < tokens; ++t)
          for (int h = 0; h < heads; ++h) {
            if (h / group != spoilt_head) REQUIRE(std::isfinite(a.out(t, h, 7)));
            if (h / group == spoilt_head && t >= at) REQUIRE(std::isnan(a.out(t, h, 7)));
          }
        for (int h = 0; h < heads; ++h)
          REQUIRE(std::isnan(a.sums(h, 0)) == (h / group == spoilt_head && side == KvSide::key));
      }
}
