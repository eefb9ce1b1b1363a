// The mean of a chunk's queries by hand.
#include <catch2/catch.hpp>
#include <cmath>

#include "cases/paged_fixture.hpp"
#include "ops/select/blocks.hpp"

using namespace kvlab;
using namespace kvlab::cases;

TEST_CASE("the mean of queries where they are, and as they would be at one text position") {
  PagedFixture cache{{.head_dim = 8, .page_size = 2}};
  for (int t = 0; t < 5; ++t) cache.append(0, 0, std::vector<float>(8, 1), std::vector<float>(8, 1), t);
  std::vector<float> queries(16), mean(8), turned(8);
  for (std::size_t d = 0; d < 8; ++d) queries[d] = static_cast<float>(d), queries[8 + d] = 2;
  const auto out = View<float, 3>::dense(mean.data(), {1, 1, 8});
  const auto of = [&](int count) {
    return View<const float, 4>::dense(queries.data() + (2 - count) * 8, {1, 1, count, 8});
  };
  ops::mean_query(cache.view(), of(2), -1, out, Stream::cpu());
  for (std::size_t d = 0; d < 8; ++d) CHECK(mean[d] == Approx((static_cast<double>(d) + 2) / 2));
  // One query is that of the newest token, at text position 4.
  ops::mean_query(cache.view(), of(1), 9, out, Stream::cpu());
  ops::turn_queries(cache.view(), View<const float, 3>::dense(queries.data() + 8, {1, 1, 8}), 9,
                    View<float, 3>::dense(turned.data(), {1, 1, 8}), Stream::cpu());
  CHECK(mean == turned);
  ops::mean_query(cache.view(), of(1), 4, out, Stream::cpu());
  CHECK(mean == std::vector<float>(8, 2));
  // Two equal queries of text positions 3 and 4, as they were turned to them, meet at any position.
  queries = std::vector<float>(16, 1);
  const RopeTable& rope = cache.view().rope_table;
  for (int i = 0; i < 2; ++i)
    for (std::size_t d = 0; d < 4; ++d) {
      const double angle = (3 + i) * double{rope.inv_freq[d]}, c = std::cos(angle), s = std::sin(angle);
      queries[static_cast<std::size_t>(i) * 8 + d] = static_cast<float>(c - s);
      queries[static_cast<std::size_t>(i) * 8 + d + 4] = static_cast<float>(c + s);
    }
  ops::mean_query(cache.view(), of(2), 0, out, Stream::cpu());
  for (const float x : mean) CHECK(x == Approx(1));
  CHECK_THROWS_WITH(
      ops::mean_query(cache.view(), View<const float, 4>::dense(queries.data(), {1, 1, 0, 8}), 0, out, Stream::cpu()),
      Catch::Contains("mean_query: got queries"));
}
