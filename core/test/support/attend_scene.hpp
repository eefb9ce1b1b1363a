// One attend call on random content, compared with the reference.
#pragma once
#include <catch2/catch.hpp>
#include <cstring>

#include "cases/paged_fixture.hpp"
#include "ops/attend/attend.hpp"

namespace kvlab::test {

using namespace cases;

struct AttendCase {
  PagedOptions options;
  int group = 1;
  std::vector<int> lengths;  // [row, kv_head], cycled
  bool listed = false, all_listed = false;
  double tokens = -1;  // share of a head's tokens in its list; -1 = no list of tokens
  int window = 0;
};

struct AttendOutputs {
  Guarded<3> out, mass;
  Guarded<2> lse;
  AttendOutputs(int rows, int heads, int dim, int tokens)
      : out({rows, heads, dim}), mass({rows, heads, tokens}), lse({rows, heads}) {}
  bool same(const AttendOutputs& o) const {
    const auto bits = [](const std::vector<float>& a, const std::vector<float>& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    return bits(out.values(), o.out.values()) && bits(mass.values(), o.mass.values()) &&
           bits(lse.values(), o.lse.values());
  }
};

// The arguments of one attend call and the memory behind them.
struct AttendScene {
  PagedFixture cache;
  std::vector<float> q;
  View<const float, 3> queries;
  std::vector<std::int32_t> last;
  ListMemory list;
  PageList pages;
  TokenList listed;
  int tokens = 0, group;
  HeapWorkspace workspace;

  AttendScene(const AttendCase& c, unsigned seed) : cache(c.options), group(c.group) {
    std::mt19937 rng(seed);
    const auto& o = c.options;
    for (int r = 0; r < o.rows; ++r)
      for (int h = 0; h < o.kv_heads; ++h) {
        const int n = c.lengths[(r * o.kv_heads + h) % c.lengths.size()];
        cache.fill_random(r, h, n, rng);
        tokens = std::max(tokens, n);
      }
    std::normal_distribution<float> normal;
    q.resize(std::size_t(o.rows) * o.kv_heads * c.group * o.head_dim);
    for (float& x : q) x = normal(rng);
    queries = View<const float, 3>::dense(q.data(), {o.rows, o.kv_heads * c.group, o.head_dim});
    for (int r = 0; r < o.rows; ++r) last.push_back(std::max(0, c.lengths[r * o.kv_heads % c.lengths.size()] - 1));
    if (c.listed || c.all_listed) pages = {list.choose_pages(cache, o, [&] { return c.all_listed || rng() % 2; })};
    if (c.tokens >= 0) listed = {list.choose_tokens(cache, o, tokens, c.tokens, rng)};
  }

  ops::AttendArgs args(const AttendOutputs& o, const AttendCase& c) {
    ops::AttendArgs a;
    a.kv = cache.view();
    a.queries = queries;
    a.pages = c.listed || c.all_listed ? &pages : nullptr;
    a.tokens = c.tokens >= 0 ? &listed : nullptr;
    a.window = c.window;
    a.last = last.data();
    a.out = o.out.view();
    a.lse = o.lse.view();
    a.mass = o.mass.view();
    return a;
  }
  AttendOutputs outputs() const {
    return {cache.options().rows, cache.options().kv_heads * group, cache.options().head_dim, tokens + 3};
  }
  AttendOutputs run(const AttendCase& c) {
    AttendOutputs o = outputs();
    ops::attend(args(o, c), workspace, Stream::cpu());
    return o;
  }
  AttendOutputs reference(const AttendCase& c) {
    AttendOutputs o = outputs();
    ops::attend_reference(args(o, c));
    return o;
  }
};

inline void check_against_reference(const AttendCase& c, unsigned seed) {
  AttendScene scene(c, seed);
  const auto before = scene.cache.arena();
  const AttendOutputs got = scene.run(c), wanted = scene.reference(c);
  const Tolerance tolerance;
  const auto worst = [](const std::vector<float>& a, const std::vector<float>& b) {
    double w = 0;
    for (std::size_t i = 0; i < a.size(); ++i)
      if (!(a[i] == b[i])) w = std::max(w, std::isfinite(a[i] - b[i]) ? std::abs(double(a[i]) - b[i]) : 1e30);
    return w;
  };
  CHECK(worst(got.out.values(), wanted.out.values()) < tolerance.output);
  CHECK(worst(got.mass.values(), wanted.mass.values()) < tolerance.probability);
  CHECK(worst(got.lse.values(), wanted.lse.values()) < tolerance.lse);
  CHECK(got.out.margins_intact());
  CHECK(got.mass.margins_intact());
  CHECK(got.lse.margins_intact());
  CHECK(scene.cache.arena() == before);
}

}  // namespace kvlab::test
