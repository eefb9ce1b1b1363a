#include <catch2/catch.hpp>
#include <cmath>

#include "cases/paged_fixture.hpp"
#include "ops/select/chunks.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

using Ints = std::vector<std::int32_t>;

const Stream s = Stream::cpu();

// A cache of one KV head, and its chunks. A key has two numbers that are not 0.
struct Head {
  PagedFixture cache{{1, 1, 8, 4, 16}};
  PagedKv kv;
  std::vector<float> landmark, cosine;
  Ints outlier, count{0};
  KeyChunks chunks;
  HeapWorkspace workspace;

  Head(const std::vector<std::pair<float, float>>& keys, int size, std::int64_t room = 8)
      : landmark(static_cast<std::size_t>(room) * 8), cosine(static_cast<std::size_t>(room)), outlier(cosine.size()) {
    for (std::size_t t = 0; t < keys.size(); ++t) {
      std::vector<float> key(8, 0.f);
      key[0] = keys[t].first, key[5] = keys[t].second;
      cache.append(0, 0, key, key, static_cast<int>(t));
    }
    kv = cache.view();
    chunks.landmark = View<float, 4>::dense(landmark.data(), {1, 1, room, 8});
    chunks.cosine = View<float, 3>::dense(cosine.data(), {1, 1, room});
    chunks.outlier = View<std::int32_t, 3>::dense(outlier.data(), {1, 1, room});
    chunks.count = View<std::int32_t, 2>::dense(count.data(), {1, 1});
    chunks.size = size;
  }
  std::pair<float, float> at(std::size_t c) const { return {landmark[c * 8], landmark[c * 8 + 5]}; }
  Ints tokens(const std::vector<float>& scores, int most) {
    Ints index(64), n(1), chosen{most};
    TokenList list;
    list.index = View<std::int32_t, 3>::dense(index.data(), {1, 1, 64});
    list.count = View<std::int32_t, 2>::dense(n.data(), {1, 1});
    const auto of = View<const float, 3>::dense(scores.data(), {1, 1, static_cast<std::int64_t>(scores.size())});
    ops::chunk_tokens(kv, scores.empty() ? View<const float, 3>{} : of,
                      View<const std::int32_t, 2>::dense(chosen.data(), {1, 1}), chunks, list, s);
    index.resize(static_cast<std::size_t>(n[0]));
    return index;
  }
};

}  // namespace

// The card's chunks of two keys.
TEST_CASE("ShadowKV's landmarks and outliers by hand") {
  Head head({{1, 0}, {0, 1}, {1, 0}, {1, .1f}, {9, 9}, {0, 0}, {7, 7}}, 2);
  ops::chunk_keys(head.kv, 1, 1, head.chunks, s);
  CHECK(head.count == Ints{2});
  CHECK(head.at(0) == std::pair{.5f, .5f});
  CHECK(head.at(1) == std::pair{1.f, .05f});
  CHECK(head.cosine[0] == Approx(.7071).margin(5e-5));
  CHECK(head.cosine[1] == Approx(.9988).margin(5e-5));
  CHECK(head.outlier[0] == 1);
  CHECK(head.outlier[1] == 0);
  CHECK(head.tokens({}, 0) == Ints{0, 1, 4, 5, 6});
  ops::chunk_keys(head.kv, 0, 1, head.chunks, s);  // a vector of zeros has the cosine 0
  CHECK(head.count == Ints{3});
  CHECK(head.cosine[2] == 0);
  CHECK(head.outlier == Ints{0, 0, 1, 0, 0, 0, 0, 0});
  ops::chunk_keys(head.kv, 0, 9, head.chunks, s);
  CHECK(head.tokens({}, 0) == Ints{0, 1, 2, 3, 4, 5, 6});
  ops::chunk_keys(head.kv, 4, 9, head.chunks, s);
  CHECK(head.count == Ints{0});
  CHECK(head.tokens({}, 0) == Ints{0, 1, 2, 3, 4, 5, 6});
}

TEST_CASE("ShadowKV's numbers of chunks: the last four and what is left over are no chunks") {
  CHECK(ops::chunks_of(8195, 8, 4, 100000) == 1020);
  CHECK(8195 - 8 * ops::chunks_of(8195, 8, 4, 100000) == 35);
  CHECK(ops::chunks_of(39, 8, 4, 100) == 0);
  CHECK(ops::chunks_of(40, 8, 4, 100) == 1);
  CHECK(ops::chunks_of(7, 8, 4, 100) == 0);
}

TEST_CASE("chunk_scores: a softmax of each query head, then the greatest or the mean of the group") {
  Head head({{1, 0}, {5, 5}, {0, 1}, {2, 2}}, 1);
  ops::chunk_keys(head.kv, 0, 0, head.chunks, s);
  head.outlier[1] = 1;
  const auto ln = [](double x) { return static_cast<float>(std::log(x)); };
  // exp(q . l) is 2, 3 and 36 for the first query, and 1, 4 and 16 for the second.
  std::vector<float> queries(16), scores(8, -1);
  queries[0] = ln(2), queries[5] = ln(3), queries[8 + 5] = ln(4);
  const auto q = View<const float, 3>::dense(queries.data(), {1, 2, 8});
  const auto out = View<float, 3>::dense(scores.data(), {1, 1, 8});
  ops::chunk_scores(head.kv, q, 1, GroupRule::max, head.chunks, out, head.workspace, s);
  CHECK(scores[0] == Approx(std::max(2. / 41, 1. / 21)));
  CHECK(scores[1] == 0);
  CHECK(scores[2] == Approx(std::max(3. / 41, 4. / 21)));
  CHECK(scores[3] == Approx(std::max(36. / 41, 16. / 21)));
  CHECK(scores[4] == -1);
  ops::chunk_scores(head.kv, q, 1, GroupRule::mean, head.chunks, out, head.workspace, s);
  CHECK(scores[2] == Approx((3. / 41 + 4. / 21) / 2));
  CHECK_THROWS_WITH(ops::chunk_scores(head.kv, q, 1, GroupRule::sum, head.chunks, out, head.workspace, s),
                    Catch::Contains("got another rule of the group"));
}

TEST_CASE("chunk_tokens: outliers, the best chunks and what lies behind") {
  Head head({{1, 0}, {1, 0}, {1, 0}, {1, 0}, {1, 0}, {1, 0}, {1, 0}, {1, 0}, {1, 0}, {1, 0}}, 2);
  ops::chunk_keys(head.kv, 1, 0, head.chunks, s);
  CHECK(head.count == Ints{4});
  head.outlier[2] = 1;
  const std::vector<float> scores{.1f, .5f, .9f, .5f, 0, 0, 0, 0};
  CHECK(head.tokens(scores, 0) == Ints{4, 5, 8, 9});
  CHECK(head.tokens(scores, 1) == Ints{2, 3, 4, 5, 8, 9});
  CHECK(head.tokens(scores, 2) == Ints{2, 3, 4, 5, 6, 7, 8, 9});
  CHECK(head.tokens(scores, 9).size() == 10);
  CHECK(head.tokens(scores, -3) == Ints{4, 5, 8, 9});
}

TEST_CASE("chunk ops refuse what they cannot do") {
  Head head({{1, 0}, {0, 1}, {1, 1}}, 1, 2);
  CHECK_THROWS_WITH(ops::chunk_keys(head.kv, 0, 0, head.chunks, s), Catch::Contains("got 3 chunks, wanted at most 2"));
  CHECK_THROWS_WITH(ops::chunk_keys(head.kv, -1, 0, head.chunks, s), Catch::Contains("got -1 local chunks"));
  ops::chunk_keys(head.kv, 1, 0, head.chunks, s);
  CHECK_THROWS_WITH(head.tokens({1}, 1), Catch::Contains("got scores [1, 1, 1], wanted [row, kv_head, 2 chunks]"));
  std::vector<float> queries(8);
  const auto out = View<float, 3>::dense(queries.data(), {1, 1, 8});
  CHECK_THROWS_WITH(ops::chunk_scores(head.kv, View<const float, 3>::dense(queries.data(), {1, 2, 4}), 1,
                                      GroupRule::max, head.chunks, out, head.workspace, s),
                    Catch::Contains("got queries [1, 2, 4], wanted [row, query head, 8]"));
  KeyChunks other = head.chunks;
  other.landmark.extent[3] = 4;
  CHECK_THROWS_WITH(ops::chunk_keys(head.kv, 1, 0, other, s),
                    Catch::Contains("with landmarks [1, 1, 2, 4], wanted those of 1 KV heads, head_dim 8"));
  head.kv.rope = RopeRegime::cache_relative;
  head.kv.rope_table.head_dim = 8;
  const float frequencies[4] = {1, 1, 1, 1};
  head.kv.rope_table.inv_freq = frequencies;
  CHECK_THROWS_WITH(ops::chunk_keys(head.kv, 1, 0, head.chunks, s), Catch::Contains("got keys before RoPE"));
  head.kv.rope = RopeRegime::original;
  head.cache.unmap(0, 0, 0);
  CHECK_THROWS_AS(ops::chunk_keys(head.kv, 1, 0, head.chunks, s), Error);
}
