#include "ops/page/causal.hpp"

#include <catch2/catch.hpp>
#include <vector>

using namespace kvlab;

TEST_CASE("causal: each token of a chunk sees itself and nothing later, in heads of different lengths") {
  const std::vector<std::int32_t> now{7, 5};
  std::vector<std::int32_t> length(6, -1), row(3, -1);
  ops::causal(now.data(), 2, 3, length.data(), row.data(), Stream::cpu());
  CHECK(length == std::vector<std::int32_t>{5, 3, 6, 4, 7, 5});
  CHECK(row == std::vector<std::int32_t>{0, 1, 2});
}

TEST_CASE("causal_pages: tokens of a chunk share the slot's list, and end where their own pages do") {
  // Heads of 7 and of 5 tokens, three of which are the chunk, in pages of 2. Slot 1 of a list that lasts.
  const std::vector<std::int32_t> now{7, 5};
  std::vector<std::int32_t> length(6), row(3), index(16, -1), count{-1, -1, 3, 2}, counts(8, -7);
  ops::causal(now.data(), 2, 3, length.data(), row.data(), Stream::cpu());
  index[8] = 0, index[9] = 2, index[10] = 3;  // of head 0
  index[12] = 1, index[13] = 2;               // of head 1
  PageList list;
  list.index = View<std::int32_t, 3>::dense(index.data(), {2, 2, 4});
  list.count = View<std::int32_t, 2>::dense(count.data(), {2, 2});
  const std::int32_t slot = 1;
  list.slots = &slot;
  PagedKv kv;
  kv.length = View<const std::int32_t, 2>::dense(length.data(), {3, 2});
  kv.slots = row.data();
  kv.rows = 3, kv.kv_heads = 2, kv.page_size = 2;
  const PageList rows = ops::causal_pages(list, slot, kv, counts.data(), Stream::cpu());
  CHECK(rows.slots == nullptr);
  // Tokens 5, 6, 7 of head 0 have pages 0 to 2, 0 to 2, 0 to 3. Tokens 3, 4, 5 of head 1 have 0 to 1 and 0 to 2.
  const std::vector<std::vector<std::int32_t>> wanted{{2, 1}, {2, 1}, {3, 2}};
  for (int r = 0; r < 3; ++r)
    for (int h = 0; h < 2; ++h) {
      CAPTURE(r, h);
      CHECK(rows.count(r, h) == wanted[static_cast<std::size_t>(r)][static_cast<std::size_t>(h)]);
      CHECK(rows.index(rows.at(r), h, 0) == h);
    }
  CHECK(count == std::vector<std::int32_t>{-1, -1, 3, 2});  // the list stays
}
