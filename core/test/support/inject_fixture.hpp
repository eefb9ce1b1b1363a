// Tables, lists and state for inject_pages. The cache has no frames, because inject_pages reads none.
#pragma once
#include <algorithm>
#include <random>
#include <vector>

#include "ops/select/inject.hpp"

namespace kvlab::test {

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

// Sequences that grow and choose pages at random. Equal numbers give equal sequences.
struct RandomInjection {
  std::mt19937 rng;
  InjectFixture f;
  Ints first, steps, page;
  std::vector<std::int64_t> begin;

  explicit RandomInjection(unsigned n)
      : rng(n), f(1 + static_cast<int>(n % 3), 1 + static_cast<int>(n / 3 % 4), n % 2 ? 16 : 5, n % 7 ? 70 : 700) {
    for (auto& x : f.length) x = static_cast<int>(below(f.most * f.args.pages.page_size - 20));
    ops::InjectArgs& a = f.args;
    a.pins = {static_cast<int>(below(n % 4 ? 20 : 1)), static_cast<int>(below(n % 5 ? 30 : 1)), n % 3 > 0};
    a.layer = static_cast<int>(below(9)), a.seed = n;
    for (auto& x : f.sequence) x = below(1000);
    a.overlap = static_cast<std::int32_t>(below(1'000'001));
    if (n % 4 == 3) record();
  }

  void next() {
    for (auto& x : f.length) x += static_cast<int>(below(3));
    if (below(3) == 0) f.question[0] = below(3);
    for (int r = 0; r < f.rows; ++r)
      for (int h = 0; h < f.heads; ++h) {
        const int pages = f.args.pages.pages(r, h);
        const unsigned share = 1 + below(8);
        int& count = f.args.list.count(r, h);
        count = 0;
        for (int p = 0; p < pages; ++p)
          if (below(8) < share || p == pages - 1) f.args.list.index(r, h, count++) = p;
      }
  }

 private:
  unsigned below(int n) { return static_cast<unsigned>(rng() % static_cast<unsigned>(n)); }

  void record() {
    ops::RecordedPages& r = f.args.recorded;
    r.questions = 3, r.layers = 3, r.heads = 2;
    r.layer = f.args.layer % 3;
    first = {2, 0, 0}, steps = {3, 0, 2};  // lists in another order than questions; question 1 has none
    for (auto& x : f.question) x = below(3);
    for (int list = 0; list < 5 * r.layers * r.heads; ++list) {
      begin.push_back(static_cast<std::int64_t>(page.size()));
      for (int p = 0; p < f.most; ++p)
        if (below(4) == 0) page.push_back(p);
    }
    begin.push_back(static_cast<std::int64_t>(page.size()));
    r.first = first.data(), r.steps = steps.data(), r.begin = begin.data(), r.page = page.data();
  }
};

}  // namespace kvlab::test
