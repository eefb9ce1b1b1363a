// Tables, lists and state for inject_pages. The cache has no frames, because inject_pages reads none.
#pragma once
#include <algorithm>
#include <vector>

#include "ops/select/inject.hpp"

namespace kvlab::cases {

using Ints = std::vector<std::int32_t>;

struct InjectFixture {
  int rows, heads, most;
  Ints length, slots, index, count;
  std::vector<PageEntry> table;
  std::vector<std::uint32_t> state, sequence, question;
  std::vector<std::byte> frame = std::vector<std::byte>(granule_bytes);
  PageLayout layout;
  ops::InjectArgs args;

  InjectFixture(int rows_, int heads_, int page_size, int most_) : rows(rows_), heads(heads_), most(most_) {
    const auto n = static_cast<std::size_t>(rows * heads);
    const std::int64_t words = ops::inject_words(most);
    length.resize(n), count.resize(n);
    index.assign(n * static_cast<std::size_t>(most), -7);
    table.resize(index.size());
    state.resize(n * static_cast<std::size_t>(words));
    for (int r = 0; r < rows; ++r) slots.push_back(rows - 1 - r), sequence.push_back(static_cast<std::uint32_t>(r));
    PagedKv& kv = args.pages;
    kv.base = frame.data();
    kv.layouts = &layout;
    kv.table = View<const PageEntry, 3>::dense(table.data(), {rows, heads, most});
    kv.length = View<const std::int32_t, 2>::dense(length.data(), {rows, heads});
    kv.slots = slots.data();
    kv.rows = rows, kv.kv_heads = heads, kv.head_dim = 64, kv.page_size = page_size;
    args.list.index = View<std::int32_t, 3>::dense(index.data(), {rows, heads, most});
    args.list.count = View<std::int32_t, 2>::dense(count.data(), {rows, heads});
    question = sequence;
    args.sequence = sequence.data(), args.question = question.data();
    args.state = View<std::uint32_t, 3>::dense(state.data(), {rows, heads, words});
  }
  InjectFixture(const InjectFixture&) = delete;

  void lengths(int tokens) { std::fill(length.begin(), length.end(), tokens); }
  // Gives every head the same list.
  void choose(const Ints& pages) {
    for (int r = 0; r < rows; ++r)
      for (int h = 0; h < heads; ++h) {
        for (std::size_t i = 0; i < pages.size(); ++i) args.list.index(r, h, static_cast<int>(i)) = pages[i];
        args.list.count(r, h) = static_cast<int>(pages.size());
      }
  }
  Ints of(int row, int head) const {
    Ints out;
    for (int i = 0; i < args.list.count(row, head); ++i) out.push_back(args.list.index(row, head, i));
    return out;
  }
};

}  // namespace kvlab::cases
