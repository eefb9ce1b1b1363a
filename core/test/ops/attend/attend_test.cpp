#include "ops/attend/attend.hpp"

#include <omp.h>

#include <catch2/catch.hpp>
#include <limits>

#include "base/backend.hpp"
#include "cases/quick.hpp"
#include "support/attend_scene.hpp"

using namespace kvlab;
using namespace kvlab::test;
using namespace kvlab::cases;

namespace {
using Case = AttendCase;
using Scene = AttendScene;
using Outputs = AttendOutputs;
}  // namespace

TEST_CASE("attend equals the reference on ragged caches of every storage") {
  const CodecSpec int8{{8}, {8}}, int8_keys{{8}, {0}};
  unsigned seed = 1;
  for (const int dim : {16, 32, 64, 80, 128})
    for (const int page : {4, 8, 16, 32})
      for (const int storage : {0, 1, 2, 3}) {
        if (quick() && seed % 7 > 0) {
          ++seed;
          continue;
        }
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
  // Tokens in another order, with their own positions, must give the same attention.
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
