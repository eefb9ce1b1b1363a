#include <catch2/catch.hpp>
#include <cmath>

#include "cases/paged_fixture.hpp"
#include "ops/score/key_factors.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

const Stream s = Stream::cpu();

// Two heads of 8 elements with these text positions, and factors of rank 2 of its one slot in f32.
struct Kept {
  PagedFixture cache{{1, 2, 8, 4, 3}};
  HeapWorkspace workspace;
  Shape shape;
  KeptKeyFactors kept;
  KeyFactors of;

  explicit Kept(const std::vector<int>& positions) {
    for (int h = 0; h < 2; ++h)
      for (const int p : positions) cache.append(0, h, std::vector<float>(8), std::vector<float>(8), p);
    shape.layers = shape.max_slots = 1, shape.query_heads = shape.kv_heads = 2, shape.head_dim = 8;
    shape.page_size = 4, shape.max_tokens = 12, shape.dtype = DType::f32;
    kept = KeptKeyFactors("factors", shape, 2, workspace);
    of = kept.of(LayerKv{});
  }
  float& token(int t, int q) { return reinterpret_cast<float*>(of.tokens)[t * of.row + q]; }
  float& basis(int q, int i) { return reinterpret_cast<float*>(of.basis)[q * 16 + i]; }
};

}  // namespace

TEST_CASE("rebuild_rows: two tokens by hand, turned by their text positions") {
  Kept x({0, 3, 7});
  x.of.count_of(0) = 2;
  x.basis(0, 1) = 1, x.basis(1, 8 + 5) = 1;  // element 1 of head 0, and element 5, its partner, of head 1
  x.token(0, 0) = 2, x.token(0, 1) = -3;
  x.token(1, 0) = 4, x.token(1, 1) = 5;
  std::vector<float> out(2 * 3 * 8, 9);
  const PagedKv kv = x.cache.view();
  const auto rows = View<float, 4>::dense(out.data(), {1, 2, 3, 8});
  ops::rebuild_rows(kv, x.of, rows, s);
  const double angle = 3 * double{kv.rope_table.inv_freq[1]}, scale = double{kv.rope_table.attention_scale};
  CHECK(rows(0, 0, 0, 1) == Approx(2 * scale));
  CHECK(rows(0, 1, 0, 5) == Approx(-3 * scale));
  CHECK(rows(0, 0, 1, 1) == Approx(4 * std::cos(angle) * scale));
  CHECK(rows(0, 0, 1, 5) == Approx(4 * std::sin(angle) * scale));
  CHECK(rows(0, 1, 1, 1) == Approx(-5 * std::sin(angle) * scale));
  CHECK(rows(0, 1, 1, 5) == Approx(5 * std::cos(angle) * scale));
  CHECK(rows(0, 0, 1, 0) == 0);
  CHECK(rows(0, 1, 2, 5) == 9);  // the third place has no numbers
}

TEST_CASE("factors cover full pages without a token that keeps its key") {
  Kept x({0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
  x.of.count_of(0) = 9;
  x.of.whole_of(0, 1)[1] = 1;
  CHECK(x.of.cover(0, 0, 0, 4));
  CHECK(x.of.cover(0, 0, 1, 4));
  CHECK_FALSE(x.of.cover(0, 0, 2, 4));
  CHECK(x.of.cover(0, 1, 0, 4));
  CHECK_FALSE(x.of.cover(0, 1, 1, 4));
}

TEST_CASE("factors: what does not fit is refused") {
  using Catch::Contains;
  Kept x({0, 1, 2});
  std::vector<float> out(2 * 3 * 8);
  const auto rows = View<float, 4>::dense(out.data(), {1, 2, 3, 8});
  PagedKv kv = x.cache.view();
  CHECK_THROWS_WITH(ops::rebuild_rows(kv, {}, rows, s), Contains("got factors of rank 0"));
  KeyFactors few = x.of;
  few.places = 2;
  CHECK_THROWS_WITH(ops::rebuild_rows(kv, few, rows, s), Contains("2 tokens, wanted those of KeptKeyFactors"));
  kv.rope = RopeRegime::re_rotate;
  CHECK_THROWS_WITH(ops::rebuild_rows(kv, x.of, rows, s), Contains("got keys that RoPE turns by ranks"));
  CHECK_THROWS_WITH(KeptKeyFactors("factors", x.shape, 17, x.workspace), Contains("got rank 17, wanted 1 to 16"));
  CHECK_THROWS_WITH(KeptKeyFactors("factors", x.shape, 0, x.workspace), Contains("got rank 0, wanted 1 to 16"));
}
