#include "ops/attend.hpp"

#include <omp.h>

#include <catch2/catch.hpp>
#include <limits>

#include "base/backend.hpp"
#include "support/paged_fixture.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

struct Case {
  PagedOptions options;
  int group = 1;
  std::vector<int> lengths;  // [row * kv_heads], cycled
  bool listed = false, all_listed = false;
  double tokens = -1;  // share of its tokens that a head's list has; -1 = no list of tokens
  int window = 0;
};

struct Outputs {
  Guarded<3> out, mass;
  Guarded<2> lse;
  Outputs(int rows, int heads, int dim, int tokens)
      : out({rows, heads, dim}), mass({rows, heads, tokens}), lse({rows, heads}) {}
  bool same(const Outputs& o) const {
    const auto bits = [](const std::vector<float>& a, const std::vector<float>& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    return bits(out.values(), o.out.values()) && bits(mass.values(), o.mass.values()) &&
           bits(lse.values(), o.lse.values());
  }
};

// Everything one attend call needs, on random content.
struct Scene {
  PagedFixture cache;
  std::vector<float> q;
  View<const float, 3> queries;
  std::vector<std::int32_t> last, index, count;
  PageList pages;
  TokenList listed;
  int tokens = 0, group;
  HeapWorkspace workspace;

  Scene(const Case& c, unsigned seed) : cache(c.options), group(c.group) {
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
    if (c.listed || c.all_listed) {
      index.assign(std::size_t(o.rows) * o.kv_heads * o.max_pages, -7);
      count.assign(o.rows * o.kv_heads, 0);
      pages.index = View<std::int32_t, 3>::dense(index.data(), {o.rows, o.kv_heads, o.max_pages});
      pages.count = View<std::int32_t, 2>::dense(count.data(), {o.rows, o.kv_heads});
      for (int r = 0; r < o.rows; ++r)
        for (int h = 0; h < o.kv_heads; ++h)
          for (int p = 0; p < cache.view().pages(r, h); ++p)
            if (c.all_listed || rng() % 2) pages.index(r, h, pages.count(r, h)++) = p;
    }
    if (c.tokens >= 0) {
      const int room = std::max(1, tokens);
      index.assign(std::size_t(o.rows) * o.kv_heads * room, -7);
      count.assign(o.rows * o.kv_heads, 0);
      listed.index = View<std::int32_t, 3>::dense(index.data(), {o.rows, o.kv_heads, room});
      listed.count = View<std::int32_t, 2>::dense(count.data(), {o.rows, o.kv_heads});
      std::uniform_real_distribution<double> share;
      for (int r = 0; r < o.rows; ++r)
        for (int h = 0; h < o.kv_heads; ++h)
          for (int t = 0; t < cache.view().tokens(r, h); ++t)
            if (share(rng) < c.tokens) listed.index(r, h, listed.count(r, h)++) = t;
    }
  }

  ops::AttendArgs args(const Outputs& o, const Case& c) {
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
  Outputs outputs() const {
    return {cache.options().rows, cache.options().kv_heads * group, cache.options().head_dim, tokens + 3};
  }
  Outputs run(const Case& c) {
    Outputs o = outputs();
    ops::attend(args(o, c), workspace, Stream::cpu());
    return o;
  }
  Outputs reference(const Case& c) {
    Outputs o = outputs();
    ops::attend_reference(args(o, c));
    return o;
  }
};

void check_against_reference(const Case& c, unsigned seed) {
  Scene scene(c, seed);
  const auto before = scene.cache.arena();
  const Outputs got = scene.run(c), wanted = scene.reference(c);
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

}  // namespace

TEST_CASE("attend equals the reference on ragged caches of every storage") {
  const CodecSpec int8{{8}, {8}}, int8_keys{{8}, {0}};
  unsigned seed = 1;
  for (const int dim : {16, 32, 64, 80, 128})
    for (const int page : {4, 8, 16, 32})
      for (const int storage : {0, 1, 2, 3}) {
        Case c;
        c.options.head_dim = dim;
        c.options.page_size = page;
        c.options.rows = 1 + static_cast<int>(seed % 5);
        c.options.kv_heads = 1 + static_cast<int>(seed % 4);
        c.options.max_pages = 100;
        c.options.dtype = storage == 0 ? DType::f32 : DType::bf16;
        c.options.codec = storage == 2 ? int8 : storage == 3 ? int8_keys : CodecSpec{};
        c.options.rope = seed % 3 == 0 ? RopeRegime::cache_relative : RopeRegime::original;
        c.group = std::vector<int>{1, 3, 4, 7}[seed % 4];
        c.lengths = {37, 0, 1, 300, page, 5 * page + 1};
        c.listed = seed % 2;
        c.window = seed % 5 == 0 ? 20 : 0;
        INFO("seed " << seed << " dim " << dim << " page " << page << " storage " << storage << " group " << c.group);
        check_against_reference(c, seed++);
      }
}

TEST_CASE("attend equals the reference on ragged lists of tokens of every storage") {
  const CodecSpec codecs[] = {{}, {{8}, {8}}, {{8}, {0}}, {{0}, {8}}};
  unsigned seed = 1;
  for (const int page : {5, 16})
    for (const int group : {1, 2, 5, 8, 16})
      for (const int storage : {0, 1, 2, 3, 4})
        for (const double share : {0.03, 0.6, 1.0}) {
          Case c;
          c.options.head_dim = std::vector<int>{64, 80, 16}[seed % 3];
          c.options.page_size = page;
          c.options.rows = 2;
          c.options.kv_heads = 3;
          c.options.max_pages = 700 / page + 1;
          c.options.dtype = storage == 0 ? DType::f32 : DType::bf16;
          c.options.codec = codecs[storage == 0 ? 0 : storage - 1];
          c.options.rope = seed % 3 == 0 ? RopeRegime::cache_relative : RopeRegime::original;
          c.group = group;
          c.lengths = {37, 0, 1, 700, page, 5 * page + 1};
          c.tokens = share;
          c.window = seed % 4 == 0 ? 40 : 0;
          INFO("seed " << seed << " page " << page << " storage " << storage << " group " << group);
          check_against_reference(c, seed++);
        }
}

TEST_CASE("attend: three tokens of two pages by hand") {
  // Scores ln 1, ln 2 and ln 5 of the listed tokens: probabilities 1/8, 2/8 and 5/8. The others would drown them.
  const float score[] = {50, 0, std::log(2.f), 60, 70, std::log(5.f), 80};
  const float value[] = {1000, 8, 4, 2000, 3000, 16, 4000};
  PagedFixture cache({});  // pages of 4
  for (int t = 0; t < 7; ++t) {
    std::vector<float> k(16, 0.f);
    k[3] = score[t];
    cache.append(0, 0, k, std::vector<float>(16, value[t]));
  }
  std::vector<float> q(16, 0.f);
  q[3] = 1;
  std::vector<std::int32_t> index{1, 2, 5}, count{3};
  const TokenList list{
      {View<std::int32_t, 3>::dense(index.data(), {1, 1, 3}), View<std::int32_t, 2>::dense(count.data(), {1, 1})}};
  for (const bool reference : {false, true}) {
    CAPTURE(reference);
    HeapWorkspace w;
    Guarded<3> out({1, 1, 16}), mass({1, 1, 9});
    Guarded<2> lse({1, 1});
    ops::AttendArgs a;
    a.kv = cache.view();
    a.queries = View<const float, 3>::dense(q.data(), {1, 1, 16});
    a.tokens = &list;
    a.softmax_scale = 1;
    a.out = out.view();
    a.lse = lse.view();
    a.mass = mass.view();
    reference ? ops::attend_reference(a) : ops::attend(a, w, Stream::cpu());
    CHECK(out(0, 0, 9) == Approx(12));  // 8 / 8 + 2 * 4 / 8 + 5 * 16 / 8
    CHECK(lse(0, 0) == Approx(std::log(8.f)));
    for (int t = 0; t < 9; ++t) CHECK(mass(0, 0, t) == Approx(t == 1 ? 0.125 : t == 2 ? 0.25 : t == 5 ? 0.625 : 0));
  }
}

TEST_CASE("attend: a list of all tokens is within rounding of no list, an empty one gives 0 and an lse of -inf") {
  for (const int storage : {0, 1, 2}) {
    Case c;
    c.options = {2, 2, 64, 5, 200, storage == 0 ? DType::f32 : DType::bf16};
    if (storage == 2) c.options.codec = {{8}, {8}};
    c.group = 3;
    c.lengths = {900, 3, 257, 256};
    Scene plain(c, 21);
    const Outputs wanted = plain.run(c);
    c.tokens = 1;
    Scene all(c, 21);
    const Outputs got = all.run(c);
    const Tolerance tolerance;
    CHECK(Tolerance::worst(got.out.values(), wanted.out.values()) < tolerance.output);
    CHECK(Tolerance::worst(got.mass.values(), wanted.mass.values()) < tolerance.probability);
    CHECK(Tolerance::worst(got.lse.values(), wanted.lse.values()) < tolerance.lse);
    c.tokens = 0;
    Scene none(c, 21);
    for (const Outputs& o : {none.run(c), none.reference(c)}) {
      for (const float x : o.out.values()) CHECK(x == 0);
      for (const float x : o.mass.values()) CHECK(x == 0);
      for (const float x : o.lse.values()) CHECK(x == -std::numeric_limits<float>::infinity());
    }
  }
}

TEST_CASE("attend: two tokens by hand") {
  // Scores q.k / sqrt(16) = 0 and ln 3: probabilities 1/4 and 3/4.
  PagedFixture cache({});
  std::vector<float> k0(16, 0.f), k1(16, 0.f), v0(16, 1.f), v1(16, 5.f), q(16, 0.f);
  k1[2] = 4 * std::log(3.f);
  q[2] = 1;
  cache.append(0, 0, k0, v0);
  cache.append(0, 0, k1, v1);
  HeapWorkspace w;
  Guarded<3> out({1, 1, 16}), mass({1, 1, 2});
  Guarded<2> lse({1, 1});
  ops::AttendArgs a;
  a.kv = cache.view();
  a.queries = View<const float, 3>::dense(q.data(), {1, 1, 16});
  a.softmax_scale = 0.25f;
  a.out = out.view();
  a.lse = lse.view();
  a.mass = mass.view();
  ops::attend(a, w, Stream::cpu());
  CHECK(out(0, 0, 7) == Approx(4));
  CHECK(lse(0, 0) == Approx(std::log(4.f)));
  CHECK(mass(0, 0, 0) == Approx(0.25));
  CHECK(mass(0, 0, 1) == Approx(0.75));
}

TEST_CASE("attend: an empty head gives 0 and an lse of -inf") {
  Case c;
  c.options.rows = 2;
  c.lengths = {0};
  Scene scene(c, 1);
  const Outputs o = scene.run(c);
  for (const float x : o.out.values()) CHECK(x == 0);
  for (const float x : o.mass.values()) CHECK(x == 0);
  for (const float x : o.lse.values()) CHECK(x == -std::numeric_limits<float>::infinity());
}

TEST_CASE("attend: a list of all pages equals no list, bit for bit; threads and other rows change nothing") {
  for (const int kind : {0, 1, 2, 3, 4, 5}) {
    const int storage = kind % 3;
    Case c;
    c.options = {3, 2, 64, 16, 100, storage == 0 ? DType::f32 : DType::bf16};
    if (storage == 2) c.options.codec = {{8}, {8}};
    c.group = 3;
    c.lengths = {1500, 3, 700, 257, 256, 1100};
    if (kind >= 3) c.tokens = 0.7;
    Scene scene(c, 11);
    omp_set_num_threads(1);
    const Outputs one = scene.run(c);
    omp_set_num_threads(4);
    const Outputs four = scene.run(c);
    CHECK(one.same(four));
    omp_set_num_threads(2);

    if (c.tokens < 0) {
      Case listed = c;
      listed.all_listed = true;
      Scene with_list(listed, 11);
      CHECK(with_list.run(listed).same(one));
    }

    for (int r = 0; r < 3; ++r) {  // each row alone
      ops::AttendArgs a = scene.args(scene.outputs(), c);
      TokenList of_row = scene.listed;
      if (a.tokens) {
        of_row.index.data += r * of_row.index.stride[0];
        of_row.count.data += r * of_row.count.stride[0];
        a.tokens = &of_row;
      }
      Outputs alone(1, 6, 64, scene.tokens + 3);
      a.kv.rows = 1;
      a.kv.slots += r;
      a.queries.data += r * a.queries.stride[0];
      a.queries.extent[0] = 1;
      a.out = alone.out.view();
      a.lse = alone.lse.view();
      a.mass = alone.mass.view();
      ops::attend(a, scene.workspace, Stream::cpu());
      CHECK(std::memcmp(&alone.out(0, 0, 0), &one.out(r, 0, 0), 6 * 64 * sizeof(float)) == 0);
      CHECK(std::memcmp(&alone.mass(0, 0, 0), &one.mass(r, 0, 0), 6 * (scene.tokens + 3) * sizeof(float)) == 0);
    }
  }
}

TEST_CASE("attend: pages of different codecs in one head") {
  Case c;
  c.options = {1, 2, 64, 16, 40, DType::bf16};
  c.group = 3;
  c.lengths = {333, 100};
  Scene scene(c, 5);
  for (const int page : {0, 3, 4, 20}) scene.cache.re_encode(0, 0, page, {{8}, {8}});
  const Outputs got = scene.run(c), wanted = scene.reference(c);
  for (std::size_t i = 0; i < got.out.values().size(); ++i)
    CHECK(got.out.values()[i] == Approx(wanted.out.values()[i]).margin(Tolerance{}.output));
}

TEST_CASE("attend: windows and ranks follow stored positions, not places") {
  // The same tokens in another order, with their positions, must attend alike.
  for (const RopeRegime regime : {RopeRegime::original, RopeRegime::cache_relative}) {
    PagedOptions o;
    o.rope = regime;
    PagedFixture forward(o), backward(o);
    std::mt19937 rng(3);
    std::normal_distribution<float> normal;
    std::vector<std::vector<float>> k(11, std::vector<float>(16)), v = k;
    std::vector<float> q(16);
    for (auto* m : {&k, &v})
      for (auto& x : *m)
        for (float& y : x) y = normal(rng);
    for (float& y : q) y = normal(rng);
    for (int t = 0; t < 11; ++t) forward.append(0, 0, k[t], v[t], 3 * t);
    for (int t = 10; t >= 0; --t) backward.append(0, 0, k[t], v[t], 3 * t);
    const std::int32_t last = 30;
    std::vector<std::vector<float>> results;
    for (PagedFixture* cache : {&forward, &backward}) {
      HeapWorkspace w;
      Guarded<3> out({1, 1, 16});
      ops::AttendArgs a;
      a.kv = cache->view();
      a.queries = View<const float, 3>::dense(q.data(), {1, 1, 16});
      a.window = 13;  // sees positions 18, 21, 24, 27, 30
      a.last = &last;
      a.out = out.view();
      ops::attend(a, w, Stream::cpu());
      results.push_back(out.values());
    }
    for (int d = 0; d < 16; ++d) CHECK(results[0][d] == Approx(results[1][d]).margin(1e-6));
  }
}

TEST_CASE("attend refuses what it cannot do") {
  Case c;
  c.options.rows = 2;
  c.lengths = {30};
  c.all_listed = true;
  Scene scene(c, 2);
  const Outputs o = scene.outputs();
  const auto code_of = [&](const ops::AttendArgs& a, Stream s) {
    try {
      ops::attend(a, scene.workspace, s);
    } catch (const Error& e) {
      return e.code();
    }
    return Errc::data;
  };
  ops::AttendArgs a = scene.args(o, c);
  if (!cuda_backend()) CHECK(code_of(a, Stream::cuda(nullptr)) == Errc::device);
  a.window = 5;
  a.last = nullptr;
  CHECK(code_of(a, Stream::cpu()) == Errc::internal);
  a = scene.args(o, c);
  std::swap(scene.pages.index(1, 0, 0), scene.pages.index(1, 0, 1));
  CHECK(code_of(a, Stream::cpu()) == Errc::internal);
  std::swap(scene.pages.index(1, 0, 0), scene.pages.index(1, 0, 1));
  CHECK(code_of(a, Stream::cpu()) == Errc::data);  // no error
  scene.cache.unmap(1, 0, 2);
  CHECK(code_of(a, Stream::cpu()) == Errc::internal);
}

TEST_CASE("attend refuses lists of tokens that are none") {
  Case c;
  c.options.rows = 2;
  c.lengths = {30};
  c.tokens = 1;
  Scene scene(c, 2);
  const Outputs o = scene.outputs();
  const ops::AttendArgs a = scene.args(o, c);
  const auto refused = [&](const ops::AttendArgs& args, const char* what) {
    try {
      ops::attend(args, scene.workspace, Stream::cpu());
    } catch (const Error& e) {
      CHECK(e.code() == Errc::internal);
      return std::string(e.what()).find(what) != std::string::npos;
    }
    return false;
  };
  const TokenList& list = scene.listed;
  std::swap(list.index(1, 0, 7), list.index(1, 0, 8));
  CHECK(refused(a, "ascending tokens"));
  list.index(1, 0, 7) = list.index(1, 0, 8) = 7;
  CHECK(refused(a, "ascending tokens"));
  list.index(1, 0, 8) = 8;
  list.index(1, 0, 29) = 30;
  CHECK(refused(a, "token 30 of 30"));
  list.index(1, 0, 29) = 29, list.index(1, 0, 0) = -1;
  CHECK(refused(a, "token -1 of 30"));
  list.index(1, 0, 0) = 0;
  for (const int count : {-1, 31}) {
    list.count(1, 0) = count;
    CHECK(refused(a, "wanted at most 30"));
  }
  list.count(1, 0) = 7;  // two pages of the eight
  ops::attend(a, scene.workspace, Stream::cpu());
  scene.cache.unmap(1, 0, 2);
  ops::attend(a, scene.workspace, Stream::cpu());
  list.count(1, 0) = 9;
  CHECK_THROWS_AS(ops::attend(a, scene.workspace, Stream::cpu()), Error);
  list.count(1, 0) = 7;
  const PageList pages{list};
  ops::AttendArgs both = a;
  both.pages = &pages;
  CHECK(refused(both, "one of the two"));
  TokenList narrow = list;
  narrow.count.extent[0] = 1;
  ops::AttendArgs small = a;
  small.tokens = &narrow;
  CHECK(refused(small, "too small a list"));
}
