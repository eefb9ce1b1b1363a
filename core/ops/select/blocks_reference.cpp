#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "ops/page/reference.hpp"
#include "ops/select/blocks.hpp"

namespace kvlab::ops {
namespace {

// The indices of the `count` best numbers, the lower index first among equal ones.
std::set<int> best_of(const std::vector<double>& x, int count) {
  std::set<int> best;
  while (static_cast<int>(best.size()) < std::min(count, static_cast<int>(x.size()))) {
    int found = -1;
    for (int i = 0; i < static_cast<int>(x.size()); ++i) {
      if (best.contains(i)) continue;
      const double a = x[static_cast<std::size_t>(i)], b = found < 0 ? NAN : x[static_cast<std::size_t>(found)];
      if (found < 0 || a > b || (std::isnan(b) && !std::isnan(a))) found = i;
    }
    best.insert(found);
  }
  return best;
}

// A vector that RoPE turns by so many places more.
std::vector<double> turned(const std::vector<float>& x, const PagedKv& kv, int places) {
  const std::size_t half = x.size() / 2;
  std::vector<double> out(x.size());
  for (std::size_t i = 0; i < half; ++i) {
    const double angle = places * double{kv.rope_table.inv_freq[i]}, a = double{x[i]}, b = double{x[i + half]};
    out[i] = a * std::cos(angle) - b * std::sin(angle);
    out[i + half] = b * std::cos(angle) + a * std::sin(angle);
  }
  return out;
}

}  // namespace

void add_block_mass_reference(const PagedKv& kv, View<const float, 3> mass, int newest, const KeyBlocks& blocks) {
  for (int r = 0; r < kv.rows; ++r)
    for (int q = 0; q < mass.extent[1]; ++q)
      for (int t = 0; t < kv.tokens(r, 0); ++t)
        if (newest == 0 || t >= kv.tokens(r, 0) - newest) blocks.mass(kv.slots[r], q, t) += mass(r, q, t);
}

void make_blocks_reference(const PagedKv& kv, const BlockRule& rule, const KeyBlocks& blocks) {
  const auto dim = static_cast<std::size_t>(kv.head_dim);
  const int group = static_cast<int>(blocks.key.extent[1]) / kv.kv_heads;
  for (int r = 0; r < kv.rows; ++r) {
    const int slot = kv.slots[r], tokens = kv.tokens(r, 0);
    for (int b = blocks.made(slot); rule.first + (b + 1) * rule.block + rule.window <= tokens; ++b) {
      blocks.made(slot) = b + 1;
      const int from = rule.first + b * rule.block;
      for (int q = 0; q < blocks.key.extent[1]; ++q) {
        std::vector<float> keys(static_cast<std::size_t>(from + rule.block) * dim);
        gather_rows_reference(kv, r, q / group, KvSide::key, from + rule.block, keys.data());
        std::vector<double> mass, sum(dim);
        for (int t = from; t < from + rule.block; ++t) mass.push_back(double{blocks.mass(slot, q, t)});
        for (const int t : best_of(mass, rule.representatives)) {
          const float* key = &keys[static_cast<std::size_t>(from + t) * dim];
          const auto x = turned({key, key + dim}, kv, rule.unturned ? -(from + t) : 0);
          for (std::size_t d = 0; d < dim; ++d) sum[d] += x[d];
        }
        for (std::size_t d = 0; d < dim; ++d)
          blocks.key(slot, q, b, static_cast<std::int64_t>(d)) = static_cast<float>(sum[d] / rule.representatives);
      }
    }
  }
}

void turn_queries_reference(const PagedKv& kv, View<const float, 3> queries, int position, View<float, 3> out) {
  for (int r = 0; r < kv.rows; ++r)
    for (int q = 0; q < queries.extent[1]; ++q) {
      const auto x = turned({&queries(r, q, 0), &queries(r, q, 0) + kv.head_dim}, kv, position - kv.tokens(r, 0) + 1);
      for (int d = 0; d < kv.head_dim; ++d) out(r, q, d) = static_cast<float>(x[static_cast<std::size_t>(d)]);
    }
}

void mean_query_reference(const PagedKv& kv, View<const float, 4> queries, int position, View<float, 3> out) {
  const std::int64_t count = queries.extent[2];
  for (int r = 0; r < kv.rows; ++r)
    for (int q = 0; q < queries.extent[1]; ++q) {
      std::vector<double> sum(static_cast<std::size_t>(kv.head_dim));
      for (std::int64_t i = 0; i < count; ++i) {
        const int at = kv.tokens(r, 0) - static_cast<int>(count - i);
        const float* x = &queries(r, q, i, 0);
        const auto y = turned({x, x + kv.head_dim}, kv, position < 0 ? 0 : position - at);
        for (std::size_t d = 0; d < sum.size(); ++d) sum[d] += y[d] / static_cast<double>(count);
      }
      for (int d = 0; d < kv.head_dim; ++d) out(r, q, d) = static_cast<float>(sum[static_cast<std::size_t>(d)]);
    }
}

void block_pages_reference(const PagedKv& kv, View<const float, 3> queries, const BlockRule& rule,
                           const std::int32_t* most, const KeyBlocks& blocks, PageList list) {
  for (int r = 0; r < kv.rows; ++r) {
    const int slot = kv.slots[r], made = blocks.made(slot);
    std::vector<double> scores;
    for (int b = 0; b < made; ++b) {
      double sum = 0;
      for (int q = 0; q < queries.extent[1]; ++q)
        for (int d = 0; d < kv.head_dim; ++d) sum += double{queries(r, q, d)} * double{blocks.key(slot, q, b, d)};
      scores.push_back(double{static_cast<float>(sum)});
    }
    const std::set<int> best = best_of(scores, most[r]);
    for (int h = 0; h < kv.kv_heads; ++h) {
      int count = 0;
      for (int page = 0; page * kv.page_size < kv.tokens(r, h); ++page) {
        const int place = page * kv.page_size - rule.first, block = place / rule.block;
        if (place < 0 || block >= made || best.contains(block)) list.index(list.at(r), h, count++) = page;
      }
      list.count(list.at(r), h) = count;
    }
  }
}

}  // namespace kvlab::ops
