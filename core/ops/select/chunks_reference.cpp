// The ops of kvlab/chunks.hpp in plain loops.
#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/page/paged.hpp"
#include "ops/select/chunks.hpp"

namespace kvlab::ops {

void chunk_keys_reference(const PagedKv& kv, int local, int outliers, const KeyChunks& out) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int slot = kv.slots[r], count = std::max(0, kv.tokens(r, h) / out.size - local);
      out.count(slot, h) = count;
      for (int c = 0; c < count; ++c) {
        std::vector<std::vector<float>> keys;
        for (int t = c * out.size; t < (c + 1) * out.size; ++t) {
          const PageEntry& e = kv.entry(r, h, t / kv.page_size);
          keys.emplace_back(static_cast<std::size_t>(kv.head_dim));
          read_row(kv.frame(e), kv.layout(e), KvSide::key, t % kv.page_size, keys.back().data());
        }
        std::vector<double> mean;
        for (int d = 0; d < kv.head_dim; ++d) {
          double sum = 0;
          for (const auto& key : keys) sum += double{key[static_cast<std::size_t>(d)]};
          out.landmark(slot, h, c, d) = static_cast<float>(sum / out.size);
          mean.push_back(double{out.landmark(slot, h, c, d)});
        }
        double least = INFINITY;
        for (const auto& key : keys) {
          double ab = 0, aa = 0, bb = 0;
          for (std::size_t d = 0; d < mean.size(); ++d)
            ab += mean[d] * double{key[d]}, aa += mean[d] * mean[d], bb += double{key[d]} * double{key[d]};
          least = std::min(least, aa > 0 && bb > 0 ? ab / (std::sqrt(aa) * std::sqrt(bb)) : 0);
        }
        out.cosine(slot, h, c) = static_cast<float>(least);
      }
      for (int c = 0; c < count; ++c) {
        int before = 0;
        for (int b = 0; b < count; ++b)
          before += out.cosine(slot, h, b) < out.cosine(slot, h, c) ||
                    (out.cosine(slot, h, b) == out.cosine(slot, h, c) && b < c);
        out.outlier(slot, h, c) = before < outliers;
      }
    }
}

void chunk_scores_reference(const PagedKv& kv, View<const float, 3> queries, float scale, GroupRule rule,
                            const KeyChunks& chunks, Scores out) {
  const std::int64_t group = queries.extent[1] / kv.kv_heads;
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int slot = kv.slots[r], count = chunks.count(slot, h);
      const auto logit = [&](std::int64_t g, int c) {
        double dot = 0;
        for (int d = 0; d < kv.head_dim; ++d) dot += double{queries(r, g, d)} * double{chunks.landmark(slot, h, c, d)};
        return double{scale} * dot;
      };
      std::vector<double> joined(static_cast<std::size_t>(count));
      for (std::int64_t g = h * group; g < (h + 1) * group; ++g) {
        double most = -INFINITY, sum = 0;
        for (int c = 0; c < count; ++c)
          if (!chunks.outlier(slot, h, c)) most = std::max(most, logit(g, c));
        for (int c = 0; c < count; ++c)
          if (!chunks.outlier(slot, h, c)) sum += std::exp(logit(g, c) - most);
        for (int c = 0; c < count; ++c) {
          if (chunks.outlier(slot, h, c)) continue;
          double& to = joined[static_cast<std::size_t>(c)];
          const double share = std::exp(logit(g, c) - most) / sum;
          if (rule == GroupRule::max)
            to = std::isnan(share) || share > to ? share : to;
          else
            to += share / static_cast<double>(group);
        }
      }
      for (int c = 0; c < count; ++c) out(r, h, c) = static_cast<float>(joined[static_cast<std::size_t>(c)]);
    }
}

// A chunk is read if fewer than `most` chunks that are no outliers come before it. NaN comes last.
void chunk_tokens_reference(const PagedKv& kv, View<const float, 3> scores, View<const std::int32_t, 2> most,
                            const KeyChunks& chunks, TokenList list) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int slot = kv.slots[r], count = chunks.count(slot, h);
      const auto better = [&](int b, int c) {
        const float x = scores(r, h, b), y = scores(r, h, c);
        if (std::isnan(x) || std::isnan(y)) return std::isnan(x) && std::isnan(y) ? b < c : std::isnan(y);
        return x > y || (x == y && b < c);
      };
      const auto read = [&](int c) {
        if (c >= count || chunks.outlier(slot, h, c)) return true;
        if (!scores.data) return false;
        int before = 0;
        for (int b = 0; b < count; ++b) before += b != c && !chunks.outlier(slot, h, b) && better(b, c);
        return before < most(r, h);
      };
      int kept = 0;
      for (int t = 0; t < kv.tokens(r, h); ++t)
        if (read(t / chunks.size)) list.index(list.at(r), h, kept++) = t;
      list.count(list.at(r), h) = kept;
    }
}

}  // namespace kvlab::ops
