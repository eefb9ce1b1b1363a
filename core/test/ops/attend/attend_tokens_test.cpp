// attend over lists of tokens.
#include <catch2/catch.hpp>
#include <limits>

#include "cases/attend_scene.hpp"

using namespace kvlab;
using namespace kvlab::cases;

TEST_CASE("attend: three tokens of two pages by hand") {
  // The listed tokens have scores ln 1, ln 2 and ln 5, so probabilities 1/8, 2/8 and 5/8. The others would drown them.
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
    AttendShape shape;
    shape.options = {2, 2, 64, 5, 200, storage == 0 ? DType::f32 : DType::bf16};
    if (storage == 2) shape.options.codec = {{8}, {8}};
    shape.group = 3;
    shape.lengths = {900, 3, 257, 256};
    const AttendOutputs wanted = AttendScene(shape, 21).run();
    shape.tokens = 1;
    const AttendOutputs got = AttendScene(shape, 21).run();
    const Tolerance tolerance;
    CHECK(Tolerance::worst(got.out.values(), wanted.out.values()) < tolerance.output);
    CHECK(Tolerance::worst(got.mass.values(), wanted.mass.values()) < tolerance.probability);
    CHECK(Tolerance::worst(got.lse.values(), wanted.lse.values()) < tolerance.lse);
    shape.tokens = 0;
    AttendScene none(shape, 21);
    for (const AttendOutputs& o : {none.run(), none.reference()}) {
      for (const float x : o.out.values()) CHECK(x == 0);
      for (const float x : o.mass.values()) CHECK(x == 0);
      for (const float x : o.lse.values()) CHECK(x == -std::numeric_limits<float>::infinity());
    }
  }
}

TEST_CASE("attend refuses lists of tokens that are none") {
  AttendShape shape;
  shape.options.rows = 2;
  shape.lengths = {30};
  shape.tokens = 1;
  AttendScene scene(shape, 2);
  const AttendOutputs o = scene.outputs();
  const ops::AttendArgs a = scene.args(o);
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
