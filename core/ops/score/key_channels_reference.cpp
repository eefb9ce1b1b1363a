#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/half.hpp"
#include "ops/page/reference.hpp"
#include "ops/score/key_channels.hpp"

namespace kvlab::ops {

void copy_channels_reference(const PagedKv& kv, int newest, const KeyChannels& channels) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int n = kv.tokens(r, h);
      std::vector<float> keys(static_cast<std::size_t>(n) * static_cast<std::size_t>(kv.head_dim));
      gather_rows_reference(kv, r, h, KvSide::key, n, keys.data());
      for (int t = std::max(0, n - newest); t < n; ++t)
        for (int d = 0; d < kv.head_dim; ++d) {
          const float x =
              keys[static_cast<std::size_t>(t) * static_cast<std::size_t>(kv.head_dim) + static_cast<std::size_t>(d)];
          std::byte* to = channels.at(kv.slots[r], h, t / KeyChannels::block, d);
          const auto at = t % KeyChannels::block;
          if (channels.dtype == DType::f32) reinterpret_cast<float*>(to)[at] = x;
          if (channels.dtype == DType::bf16) reinterpret_cast<bf16*>(to)[at] = bf16(x);
          if (channels.dtype == DType::f16) reinterpret_cast<std::uint16_t*>(to)[at] = float_to_half(x);
        }
    }
}

void large_channels_reference(const PagedKv& kv, View<const float, 3> queries, int rank, bool norm_scale,
                              const IndexList& channels, View<float, 3> vectors) {
  const int group = static_cast<int>(queries.extent[1]) / kv.kv_heads;
  const bool each = vectors.extent[1] != kv.kv_heads;
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      std::vector<double> size(static_cast<std::size_t>(kv.head_dim));
      for (int d = 0; d < kv.head_dim; ++d)
        for (int g = 0; g < group; ++g)
          size[static_cast<std::size_t>(d)] += std::fabs(double{queries(r, h * group + g, d)});
      channels.count(channels.at(r), h) = 0;
      for (int d = 0; d < kv.head_dim; ++d) {
        int larger = 0;
        for (int e = 0; e < kv.head_dim; ++e) {
          const double own = size[static_cast<std::size_t>(d)], other = size[static_cast<std::size_t>(e)];
          larger += other > own || (other == own && e < d);
        }
        for (int g = 0; g < (each ? group : 1); ++g) vectors(r, each ? h * group + g : h, d) = 0;
        if (larger < rank) channels.index(channels.at(r), h, channels.count(channels.at(r), h)++) = d;
      }
      for (int i = 0; i < rank; ++i) {
        double sum = 0;
        const int d = channels.index(channels.at(r), h, i);
        for (int g = 0; g < group; ++g) {
          double all = 0, large = 0;
          for (int e = 0; e < kv.head_dim; ++e) all += std::fabs(double{queries(r, h * group + g, e)});
          for (int j = 0; j < rank; ++j)
            large += std::fabs(double{queries(r, h * group + g, channels.index(channels.at(r), h, j))});
          const double by = norm_scale && large > 0 ? std::sqrt(kv.head_dim * large / all) : 1;
          const double own = double{queries(r, h * group + g, d)} / by;
          if (each) vectors(r, h * group + g, d) = static_cast<float>(own);
          sum += own;
        }
        if (!each) vectors(r, h, d) = static_cast<float>(sum);
      }
    }
}

void channel_dot_reference(const PagedKv& kv, View<const float, 3> vectors, const IndexList& channels,
                           const KeyChannels& copy, int newest, Scores out, Scores each) {
  const int group = static_cast<int>(vectors.extent[1]) / kv.kv_heads;
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      for (int t = 0; t < kv.tokens(r, h); ++t) {
        double sum = 0;
        for (int g = 0; g < group; ++g) {
          double own = 0;
          for (int i = 0; i < channels.count(channels.at(r), h); ++i) {
            const int d = channels.index(channels.at(r), h, i);
            const std::byte* from = copy.at(kv.slots[r], h, t / KeyChannels::block, d);
            const auto at = t % KeyChannels::block;
            double x = 0;
            if (copy.dtype == DType::f32) x = reinterpret_cast<const float*>(from)[at];
            if (copy.dtype == DType::bf16) x = static_cast<float>(reinterpret_cast<const bf16*>(from)[at]);
            if (copy.dtype == DType::f16) x = half_to_float(reinterpret_cast<const std::uint16_t*>(from)[at]);
            own += double{vectors(r, h * group + g, d)} * x;
          }
          if (each) each(r, h * group + g, t) = static_cast<float>(own);
          sum += own;
        }
        out(r, h, t) = t >= kv.tokens(r, h) - newest ? std::numeric_limits<float>::infinity() : static_cast<float>(sum);
      }
}

}  // namespace kvlab::ops
