#include "ops/attend/attend.hpp"

#include <omp.h>

#include <catch2/catch.hpp>
#include <limits>

#include "base/backend.hpp"
#include "cases/attend_scene.hpp"

using namespace kvlab;
using namespace kvlab::cases;

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

TEST_CASE("attend: keys of far tokens by hand") {
  // Tokens 0 to 2 have a key of one pair, which turns by `slow` a place. The query lies at place 10.
  PagedFixture cache({});
  const double slow = std::pow(10000., -2. / 16);
  std::vector<float> k(16, 0.f), v(16, 0.f), q(16, 0.f);
  k[1] = 2, q[1] = 3, q[9] = 1;
  for (int t = 0; t < 3; ++t) cache.append(0, 0, k, v, t);
  const std::vector<std::int32_t> last{10};
  for (const bool reference : {false, true})
    for (const int most : {0, 4, 9, 10}) {
      CAPTURE(reference, most);
      HeapWorkspace w;
      Guarded<3> out({1, 1, 16}), mass({1, 1, 3});
      ops::AttendArgs a;
      a.kv = cache.view();
      a.kv.rope_table.attention_scale = 3;  // is in keys and queries already
      a.queries = View<const float, 3>::dense(q.data(), {1, 1, 16});
      a.out = out.view(), a.mass = mass.view();
      a.last = last.data(), a.most_distance = most;
      reference ? ops::attend_reference(a) : ops::attend(a, w, Stream::cpu());
      double share[3], sum = 0;
      for (int t = 0; t < 3; ++t) {
        const double turn = slow * (most > 0 ? std::max(0, 10 - most - t) : 0);
        sum += share[t] = std::exp((3 * 2 * std::cos(turn) + 2 * std::sin(turn)) / 4);
      }
      for (int t = 0; t < 3; ++t) CHECK(mass(0, 0, t) == Approx(share[t] / sum));
    }
}

TEST_CASE("attend: an empty head gives 0 and an lse of -inf") {
  AttendShape shape;
  shape.options.rows = 2;
  shape.lengths = {0};
  const AttendOutputs o = AttendScene(shape, 1).run();
  for (const float x : o.out.values()) CHECK(x == 0);
  for (const float x : o.mass.values()) CHECK(x == 0);
  for (const float x : o.lse.values()) CHECK(x == -std::numeric_limits<float>::infinity());
}

TEST_CASE("attend: a list of all pages equals no list, bit for bit; threads and other rows change nothing") {
  for (const int kind : {0, 1, 2, 3, 4, 5}) {
    const int storage = kind % 3;
    AttendShape shape;
    shape.options = {3, 2, 64, 16, 100, storage == 0 ? DType::f32 : DType::bf16};
    if (storage == 2) shape.options.codec = {{8}, {8}};
    shape.group = 3;
    shape.lengths = {1500, 3, 700, 257, 256, 1100};
    if (kind >= 3) shape.tokens = 0.7;
    AttendScene scene(shape, 11);
    omp_set_num_threads(1);
    const AttendOutputs one = scene.run();
    omp_set_num_threads(4);
    const AttendOutputs four = scene.run();
    CHECK(one.same(four));
    omp_set_num_threads(2);

    if (shape.tokens < 0) {
      AttendShape listed = shape;
      listed.all_listed = true;
      CHECK(AttendScene(listed, 11).run().same(one));
    }

    const AttendOutputs alone = scene.outputs();
    for (int r = 0; r < 3; ++r) ops::attend(AttendRow(scene.args(alone), r).args, scene.workspace, Stream::cpu());
    CHECK(alone.same(one));
  }
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
  AttendShape shape;
  shape.options.rows = 2;
  shape.lengths = {30};
  shape.all_listed = true;
  AttendScene scene(shape, 2);
  const AttendOutputs o = scene.outputs();
  const auto code_of = [&](const ops::AttendArgs& a, Stream s) {
    try {
      ops::attend(a, scene.workspace, s);
    } catch (const Error& e) {
      return e.code();
    }
    return Errc::data;
  };
  ops::AttendArgs a = scene.args(o);
  if (!cuda_backend()) CHECK(code_of(a, Stream::cuda(nullptr)) == Errc::device);
  a.window = 5;
  a.last = nullptr;
  CHECK(code_of(a, Stream::cpu()) == Errc::internal);
  a = scene.args(o);
  std::swap(scene.pages.index(1, 0, 0), scene.pages.index(1, 0, 1));
  CHECK(code_of(a, Stream::cpu()) == Errc::internal);
  std::swap(scene.pages.index(1, 0, 0), scene.pages.index(1, 0, 1));
  CHECK(code_of(a, Stream::cpu()) == Errc::data);  // no error
  scene.cache.unmap(1, 0, 2);
  CHECK(code_of(a, Stream::cpu()) == Errc::internal);
}
