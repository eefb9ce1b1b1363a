#include "ops/select/blocks.hpp"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "base/device_op.hpp"
#include "base/per_thread.hpp"
#include "ops/page/check.hpp"
#include "ops/page/extents.hpp"
#include "ops/page/paged.hpp"
#include "ops/select/clusters.hpp"

namespace kvlab::ops {
namespace {

void check_blocks(const PagedKv& kv, const KeyBlocks& b, const char* op) {
  const std::int64_t slots = b.made.extent[0], heads = b.key.extent[1];
  if (heads < kv.kv_heads || heads % kv.kv_heads || b.key.extent[0] != slots || b.key.extent[3] != kv.head_dim ||
      b.key.stride[3] != 1 || b.mass.extent[0] != slots || b.mass.extent[1] != heads || b.mass.stride[2] != 1)
    fail(Errc::internal, op,
         "got blocks of " + extents(b.key) + " numbers and " + extents(b.mass) + " sums, wanted those of " +
             std::to_string(kv.kv_heads) + " KV heads' query heads, head_dim " + std::to_string(kv.head_dim) +
             ", dense");
}

void check_rule(const PagedKv& kv, const BlockRule& rule, const char* op) {
  if (rule.first < 0 || rule.first % kv.page_size || rule.block < 1 || rule.block > most_block ||
      rule.block % kv.page_size)
    fail(Errc::internal, op,
         "got blocks of " + std::to_string(rule.block) + " tokens from place " + std::to_string(rule.first) +
             " on, wanted whole pages of " + std::to_string(kv.page_size) + ", and at most " +
             std::to_string(most_block));
  if (rule.window < 0 || rule.representatives < 1 || rule.representatives > rule.block)
    fail(Errc::internal, op,
         "got a window of " + std::to_string(rule.window) + " tokens and " + std::to_string(rule.representatives) +
             " representatives, wanted at least 0, and 1 to " + std::to_string(rule.block));
}

// The row's tokens, which all of its KV heads hold.
int tokens_of(const PagedKv& kv, int row, const char* op) {
  const int n = kv.tokens(row, 0);
  for (int h = 1; h < kv.kv_heads; ++h)
    if (kv.tokens(row, h) != n)
      fail(Errc::internal, op,
           "got KV heads of " + std::to_string(n) + " and of " + std::to_string(kv.tokens(row, h)) +
               " tokens, wanted the same tokens in all of them");
  return n;
}

void check_rope(const PagedKv& kv, const char* op) {
  if (kv.rope != RopeRegime::original)
    fail(Errc::unsupported, op, "got keys that RoPE turns by ranks, wanted the regime original: by text positions");
  if (!kv.rope_table.inv_freq || kv.rope_table.head_dim != kv.head_dim)
    fail(Errc::internal, op, "got no RoPE table, wanted the model's");
}

// Cached keys and queries carry attention_scale already.
RopeTable unscaled(const PagedKv& kv) {
  RopeTable rope = kv.rope_table;
  rope.attention_scale = 1;
  return rope;
}

// Scratch of each thread.
struct OfBlock {
  PerThread<int> order;
  PerThread<float> key;
  PerThread<double> sum;

  OfBlock(int block, int dim)
      : order(static_cast<std::size_t>(block)),
        key(static_cast<std::size_t>(dim)),
        sum(static_cast<std::size_t>(dim)) {}
};

void make_block(const PagedKv& kv, int row, int query_head, int block, const BlockRule& rule, const KeyBlocks& to,
                OfBlock& scratch) {
  const std::int64_t slot = kv.slots[row];
  const int head = query_head / static_cast<int>(to.key.extent[1] / kv.kv_heads),
            first = rule.first + block * rule.block;
  const float* mass = &to.mass(slot, query_head, first);
  const auto order = scratch.order.own();
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  const auto end = order.begin() + rule.representatives;
  std::partial_sort(order.begin(), end, order.end(),
                    [&](int a, int b) { return comes_before(mass[a], a, mass[b], b); });
  std::sort(order.begin(), end);
  const auto key = scratch.key.own();
  const auto sum = scratch.sum.own();
  std::fill(sum.begin(), sum.end(), 0.);
  for (auto i = order.begin(); i != end; ++i) {
    const int place = first + *i;
    const PageEntry& e = kv.entry(row, head, place / kv.page_size);
    read_row(kv.frame(e), kv.layout(e), KvSide::key, place % kv.page_size, key.data());
    if (rule.unturned) rotate(key.data(), unscaled(kv), -static_cast<double>(place));
    for (std::size_t d = 0; d < sum.size(); ++d) sum[d] += double{key[d]};
  }
  for (std::size_t d = 0; d < sum.size(); ++d)
    to.key(slot, query_head, block, static_cast<std::int64_t>(d)) = static_cast<float>(sum[d] / rule.representatives);
}

}  // namespace

void add_block_mass(const PagedKv& kv, View<const float, 3> mass, int newest, const KeyBlocks& blocks, Stream s) {
  const char* op = "add_block_mass";
  check_kv(kv, op, s);
  check_blocks(kv, blocks, op);
  check_scores(kv, mass, "mass", op, s);
  if (mass.extent[1] != blocks.mass.extent[1] || newest < 0)
    fail(Errc::internal, op,
         "got mass " + extents(mass) + " of " + std::to_string(newest) + " tokens, wanted it of " +
             std::to_string(blocks.mass.extent[1]) + " query heads, and at least 0 tokens");
  if (s.device() == Device::cuda) return on_cuda<add_block_mass>(kv, mass, newest, blocks, s);
  for (int r = 0; r < kv.rows; ++r) {
    const int n = tokens_of(kv, r, op), from = newest > 0 ? std::max(0, n - newest) : 0;
    if (n > blocks.mass.extent[2])
      fail(Errc::internal, op,
           "got " + std::to_string(n) + " tokens, wanted at most " + std::to_string(blocks.mass.extent[2]) +
               ", for which there is room");
    for (std::int64_t q = 0; q < mass.extent[1]; ++q)
      for (int t = from; t < n; ++t) blocks.mass(kv.slots[r], q, t) += mass(r, q, t);
  }
}

void make_blocks(const PagedKv& kv, const BlockRule& rule, const KeyBlocks& blocks, Stream s) {
  const char* op = "make_blocks";
  check_kv(kv, op, s);
  check_blocks(kv, blocks, op);
  check_rule(kv, rule, op);
  if (kv.rope == RopeRegime::cache_relative)
    fail(Errc::unsupported, op, "got keys before RoPE (cache_relative), wanted keys that are stored as rotated");
  if (rule.unturned) check_rope(kv, op);
  if (s.device() == Device::cuda) return on_cuda<make_blocks>(kv, rule, blocks, s);
  const int heads = static_cast<int>(blocks.key.extent[1]);
  OfBlock scratch(rule.block, kv.head_dim);
  for (int r = 0; r < kv.rows; ++r) {
    std::int32_t& made = blocks.made(kv.slots[r]);
    const int wanted = rule.blocks(tokens_of(kv, r, op)), first = made;
    if (wanted > blocks.key.extent[2])
      fail(Errc::internal, op,
           "got " + std::to_string(wanted) + " blocks, wanted at most " + std::to_string(blocks.key.extent[2]) +
               ", for which there is room");
    const int size = kv.page_size;
    for (int p = (rule.first + first * rule.block) / size; p < (rule.first + wanted * rule.block) / size; ++p)
      for (int h = 0; h < kv.kv_heads; ++h) check_page(kv, r, h, p, op);
#pragma omp parallel for collapse(2) \
    schedule(static) if (worth_threads(std::int64_t{wanted - first} * heads * rule.block))
    for (int b = first; b < wanted; ++b)
      for (int q = 0; q < heads; ++q) make_block(kv, r, q, b, rule, blocks, scratch);
    made = std::max(first, wanted);
  }
}

void turn_queries(const PagedKv& kv, View<const float, 3> queries, int position, View<float, 3> out, Stream s) {
  const char* op = "turn_queries";
  check_kv(kv, op, s);
  if (queries.extent[0] < kv.rows || queries.extent[2] != kv.head_dim || queries.stride[2] != 1 ||
      out.extent[0] < kv.rows || out.extent[1] != queries.extent[1] || out.extent[2] != kv.head_dim ||
      out.stride[2] != 1)
    fail(Errc::internal, op,
         "got queries " + extents(queries) + " and out " + extents(out) + ", wanted [row, query head, " +
             std::to_string(kv.head_dim) + "] twice, dense");
  check_rope(kv, op);
  if (s.device() == Device::cuda) return on_cuda<turn_queries>(kv, queries, position, out, s);
  for (int r = 0; r < kv.rows; ++r) {
    const double turn = position - (tokens_of(kv, r, op) - 1);
    for (std::int64_t q = 0; q < queries.extent[1]; ++q) {
      std::copy_n(&queries(r, q, 0), kv.head_dim, &out(r, q, 0));
      rotate(&out(r, q, 0), unscaled(kv), turn);
    }
  }
}

void mean_query(const PagedKv& kv, View<const float, 4> queries, int position, View<float, 3> out, Stream s) {
  const char* op = "mean_query";
  check_kv(kv, op, s);
  if (queries.extent[0] < kv.rows || queries.extent[2] < 1 || queries.extent[3] != kv.head_dim ||
      queries.stride[3] != 1 || out.extent[0] < kv.rows || out.extent[1] != queries.extent[1] ||
      out.extent[2] != kv.head_dim || out.stride[2] != 1)
    fail(Errc::internal, op,
         "got queries " + extents(queries) + " and out " + extents(out) + ", wanted [row, query head, 1 or more, " +
             std::to_string(kv.head_dim) + "] and one of each head, dense");
  check_rope(kv, op);
  if (s.device() == Device::cuda) return on_cuda<mean_query>(kv, queries, position, out, s);
  const std::int64_t count = queries.extent[2], dim = kv.head_dim;
  PerThread<double> sums(static_cast<std::size_t>(dim));
  PerThread<float> rows(static_cast<std::size_t>(dim));
  for (int r = 0; r < kv.rows; ++r) {
    const std::int64_t first = tokens_of(kv, r, op) - count;
#pragma omp parallel for schedule(static) if (worth_threads(queries.extent[1] * count * dim))
    for (std::int64_t q = 0; q < queries.extent[1]; ++q) {
      const auto sum = sums.own();
      const auto x = rows.own();
      std::fill(sum.begin(), sum.end(), 0.);
      for (std::int64_t i = 0; i < count; ++i) {
        std::copy_n(&queries(r, q, i, 0), dim, x.data());
        if (position >= 0) rotate(x.data(), unscaled(kv), static_cast<double>(position - (first + i)));
        for (std::size_t d = 0; d < sum.size(); ++d) sum[d] += double{x[d]};
      }
      for (std::int64_t d = 0; d < dim; ++d)
        out(r, q, d) = static_cast<float>(sum[static_cast<std::size_t>(d)] / static_cast<double>(count));
    }
  }
}

void block_pages(const PagedKv& kv, View<const float, 3> queries, const BlockRule& rule, const std::int32_t* most,
                 const KeyBlocks& blocks, Scores scores, PageList list, Stream s) {
  const char* op = "block_pages";
  check_kv(kv, op, s);
  check_blocks(kv, blocks, op);
  check_rule(kv, rule, op);
  check_list(kv, list, op);
  if (queries.extent[0] < kv.rows || queries.extent[1] != blocks.key.extent[1] || queries.extent[2] != kv.head_dim ||
      queries.stride[2] != 1)
    fail(Errc::internal, op,
         "got queries " + extents(queries) + ", wanted [row, " + std::to_string(blocks.key.extent[1]) +
             " query heads, " + std::to_string(kv.head_dim) + "], dense");
  if (scores.extent[0] < kv.rows || scores.extent[1] < 1 || scores.extent[2] < blocks.key.extent[2])
    fail(Errc::internal, op,
         "got scores " + extents(scores) + ", wanted [row, 1, " + std::to_string(blocks.key.extent[2]) + " blocks]");
  if (s.device() == Device::cuda) return on_cuda<block_pages>(kv, queries, rule, most, blocks, scores, list, s);
  for (int r = 0; r < kv.rows; ++r) {
    const std::int64_t slot = kv.slots[r];
    const int made = blocks.made(slot), n = (tokens_of(kv, r, op) + kv.page_size - 1) / kv.page_size;
    if (list.index.extent[2] < n)
      fail(Errc::internal, op,
           "got a list for " + std::to_string(list.index.extent[2]) + " pages, wanted room for " + std::to_string(n));
    for (int b = 0; b < made; ++b) {
      double sum = 0;
      for (std::int64_t q = 0; q < queries.extent[1]; ++q) {
        const float *x = &queries(r, q, 0), *key = &blocks.key(slot, q, b, 0);
        for (int d = 0; d < kv.head_dim; ++d) sum += double{x[d]} * double{key[d]};
      }
      scores(r, 0, b) = static_cast<float>(sum);
    }
    std::vector<int> order(static_cast<std::size_t>(made));
    for (int b = 0; b < made; ++b) order[static_cast<std::size_t>(b)] = b;
    const int chosen = std::min(made, most[r]);
    std::nth_element(order.begin(), order.begin() + chosen, order.end(),
                     [&](int a, int b) { return comes_before(scores(r, 0, a), a, scores(r, 0, b), b); });
    const int pages = rule.block / kv.page_size, first = rule.first / kv.page_size, end = first + made * pages;
    std::vector<bool> read(static_cast<std::size_t>(n));
    for (int p = 0; p < n; ++p) read[static_cast<std::size_t>(p)] = p < first || p >= end;
    for (int i = 0; i < chosen; ++i)
      for (int p = 0, at = first + order[static_cast<std::size_t>(i)] * pages; p < pages && at + p < n; ++p)
        read[static_cast<std::size_t>(at + p)] = true;
    for (int h = 0; h < kv.kv_heads; ++h) {
      int count = 0;
      for (int p = 0; p < n; ++p)
        if (read[static_cast<std::size_t>(p)]) list.index(list.at(r), h, count++) = p;
      list.count(list.at(r), h) = count;
    }
  }
}

}  // namespace kvlab::ops
