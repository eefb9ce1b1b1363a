#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "base/half.hpp"
#include "ops/page/reference.hpp"
#include "ops/score/partial_keys.hpp"

namespace kvlab::ops {
namespace {

double channel_of(const float* x, const Directions& directions, int head, std::int64_t channel, int dim) {
  if (!directions) return double{x[channel]};
  double sum = 0;
  for (int d = 0; d < dim; ++d) sum += double{x[d]} * double{directions(head, channel, d)};
  return sum;
}

}  // namespace

void add_channel_magnitudes_reference(const PagedKv& kv, View<const float, 4> queries, Directions directions,
                                      View<float, 3> sums) {
  const std::int64_t group = queries.extent[1] / kv.kv_heads;
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      for (int c = 0; c < kv.head_dim; ++c) {
        double sum = double{sums(kv.slots[r], h, c)};
        for (std::int64_t i = 0; i < queries.extent[2]; ++i)
          for (std::int64_t g = h * group; g < (h + 1) * group; ++g)
            sum += std::abs(channel_of(&queries(r, g, i, 0), directions, h, c, kv.head_dim));
        sums(kv.slots[r], h, c) = static_cast<float>(sum);
      }
}

void copy_partial_keys_reference(const PagedKv& kv, int newest, const PartialKeys& keys) {
  const auto dim = static_cast<std::size_t>(kv.head_dim);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int slot = kv.slots[r], tokens = kv.tokens(r, h);
      std::vector<float> all(static_cast<std::size_t>(tokens) * dim);
      gather_rows_reference(kv, r, h, KvSide::key, tokens, all.data());
      for (int t = tokens > newest ? tokens - newest : 0; t < tokens; ++t)
        for (std::int64_t i = 0; i < keys.channels.extent[2]; ++i) {
          const auto x = static_cast<float>(channel_of(&all[static_cast<std::size_t>(t) * dim], keys.directions, h,
                                                       keys.channels(slot, h, i), kv.head_dim));
          keys.rows(slot, h, t, i) = float_to_half(std::abs(x) > 65504 ? std::copysign(65504.f, x) : x);
        }
    }
}

void partial_scores_reference(const PagedKv& kv, View<const float, 3> queries, const PartialKeys& keys, float factor,
                              int newest, Scores out) {
  const std::int64_t group = queries.extent[1] / kv.kv_heads;
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      for (int t = 0; t < kv.tokens(r, h); ++t) {
        const int slot = kv.slots[r];
        double most = -INFINITY;
        for (std::int64_t g = h * group; g < (h + 1) * group; ++g) {
          double sum = 0;
          for (std::int64_t i = 0; i < keys.channels.extent[2]; ++i)
            sum += channel_of(&queries(r, g, 0), keys.directions, h, keys.channels(slot, h, i), kv.head_dim) *
                   double{half_to_float(keys.rows(slot, h, t, i))};
          if (sum > most) most = sum;
        }
        out(r, h, t) = t + newest < kv.tokens(r, h) ? static_cast<float>(double{factor} * most) : INFINITY;
      }
}

void token_pages_reference(const PagedKv& kv, const TokenList& tokens, int newest, PageList out) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      std::set<std::int32_t> pages;
      for (int i = 0; i < tokens.count(tokens.at(r), h); ++i)
        if (const int t = tokens.index(tokens.at(r), h, i); t < kv.tokens(r, h) - newest)
          pages.insert(t / kv.page_size);
      std::copy(pages.begin(), pages.end(), &out.index(out.at(r), h, 0));
      out.count(out.at(r), h) = static_cast<std::int32_t>(pages.size());
    }
}

}  // namespace kvlab::ops
