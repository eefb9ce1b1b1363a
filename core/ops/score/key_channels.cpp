// Keys by channel beside the cache, the channels in which queries are large, and logits by these alone.
#include "ops/score/key_channels.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/page/paged.hpp"
#include "ops/score/newest_keys.hpp"

namespace kvlab::ops {
namespace {

constexpr int block = static_cast<int>(KeyChannels::block);

void check_channels(const PagedKv& kv, const KeyChannels& c, const char* op, Stream s) {
  if (!c.data || c.kv_heads != kv.kv_heads || c.head_dim != kv.head_dim)
    fail(Errc::internal, op, "got keys by channel of another shape, wanted those of this cache's KV heads");
  if (kv.rope == RopeRegime::cache_relative)
    fail(Errc::unsupported, op, "got keys before RoPE (cache_relative), wanted keys that are stored as rotated");
  if (s.device() == Device::cuda) return;
  if (c.dtype == DType::f16) fail(Errc::unsupported, op, "got keys by channel in f16, wanted f32 or bf16 on the CPU");
  if (longest(kv) > c.blocks * block)
    fail(Errc::internal, op,
         "got keys by channel with room for " + std::to_string(c.blocks * block) + " tokens, wanted " +
             std::to_string(longest(kv)));
}

void check_list_of(const PagedKv& kv, const IndexList& channels, const char* op) {
  if (!channels.index || !channels.count || channels.index.extent[0] < kv.rows ||
      channels.index.extent[1] < kv.kv_heads || channels.count.extent[0] < kv.rows ||
      channels.count.extent[1] < kv.kv_heads)
    fail(Errc::internal, op, "got a list of channels of another shape, wanted [row, kv_head, channel]");
}

void check_vectors(const PagedKv& kv, const View<const float, 3>& vectors, std::int64_t heads, const char* op) {
  if (!vectors || vectors.extent[0] < kv.rows || vectors.extent[1] != heads || vectors.extent[2] != kv.head_dim ||
      vectors.stride[2] != 1)
    fail(Errc::internal, op,
         "got vectors of another shape, wanted [row, head, head_dim] of " + std::to_string(heads) + " heads");
}

// A channel's numbers in the copy's dtype.
template <class T>
void add_channel(const T* channel, int count, float factor, float* sums) {
  for (int t = 0; t < count; ++t) sums[t] += factor * static_cast<float>(channel[t]);
}

}  // namespace

void copy_channels(const PagedKv& kv, int newest, const KeyChannels& channels, Stream s) {
  const char* op = "copy_channels";
  check_kv(kv, op, s);
  check_channels(kv, channels, op, s);
  check_newest(newest, op);
  if (s.device() == Device::cuda) return on_cuda<copy_channels>(kv, newest, channels, s);
  for_newest_keys(kv, newest, kv.head_dim, op, [&](int r, int h, int t, const float* key) {
    for (int d = 0; d < kv.head_dim; ++d) {
      std::byte* to = channels.at(kv.slots[r], h, t / block, d);
      if (channels.dtype == DType::f32)
        reinterpret_cast<float*>(to)[t % block] = key[d];
      else
        reinterpret_cast<bf16*>(to)[t % block] = bf16(key[d]);
    }
  });
}

void large_channels(const PagedKv& kv, View<const float, 3> queries, int rank, bool norm_scale,
                    const IndexList& channels, View<float, 3> vectors, Stream s) {
  const char* op = "large_channels";
  check_kv(kv, op, s);
  check_list_of(kv, channels, op);
  const bool each = vectors.extent[1] == queries.extent[1];
  check_vectors(kv, vectors, each ? queries.extent[1] : kv.kv_heads, op);
  const int dim = kv.head_dim;
  if (queries.extent[0] < kv.rows || queries.extent[1] % kv.kv_heads || queries.extent[2] != dim ||
      queries.stride[2] != 1)
    fail(Errc::internal, op, "got queries of another shape, wanted [row, query head, head_dim]");
  if (rank < 1 || rank > dim || rank > channels.index.extent[2])
    fail(Errc::internal, op,
         "got rank " + std::to_string(rank) + ", wanted 1 to " +
             std::to_string(std::min<std::int64_t>(dim, channels.index.extent[2])) +
             ", the list's room and the channels");
  if (s.device() == Device::cuda) return on_cuda<large_channels>(kv, queries, rank, norm_scale, channels, vectors, s);
  const int group = static_cast<int>(queries.extent[1]) / kv.kv_heads;
  std::vector<double> size(static_cast<std::size_t>(dim)), sum(size.size());
  std::vector<int> order(size.size());
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const auto query = [&](int g) { return &queries(r, h * group + g, 0); };
      std::fill(size.begin(), size.end(), 0.), std::fill(sum.begin(), sum.end(), 0.);
      for (int g = 0; g < group; ++g)
        for (int d = 0; d < dim; ++d) size[static_cast<std::size_t>(d)] += std::fabs(double{query(g)[d]});
      for (double& x : size)
        if (std::isnan(x)) x = INFINITY;
      for (int d = 0; d < dim; ++d) order[static_cast<std::size_t>(d)] = d;
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
        return size[static_cast<std::size_t>(a)] > size[static_cast<std::size_t>(b)];
      });
      std::sort(order.begin(), order.begin() + rank);
      const std::int64_t at = channels.at(r);
      channels.count(at, h) = rank;
      for (int i = 0; i < rank; ++i) channels.index(at, h, i) = order[static_cast<std::size_t>(i)];
      for (int g = 0; g < group; ++g) {
        double all = 0, large = 0;
        for (int d = 0; d < dim; ++d) all += std::fabs(double{query(g)[d]});
        for (int i = 0; i < rank; ++i) large += std::fabs(double{query(g)[order[static_cast<std::size_t>(i)]]});
        const double by = norm_scale ? large > 0 ? 1 / std::sqrt(dim * large / all) : 0. : 1.;
        for (int i = 0; i < rank; ++i) {
          const int d = order[static_cast<std::size_t>(i)];
          sum[static_cast<std::size_t>(d)] += by * double{query(g)[d]};
        }
        if (g + 1 < group && !each) continue;
        float* to = &vectors(r, each ? h * group + g : h, 0);
        for (int d = 0; d < dim; ++d) to[d] = static_cast<float>(sum[static_cast<std::size_t>(d)]);
        std::fill(sum.begin(), sum.end(), 0.);
      }
    }
}

void channel_dot(const PagedKv& kv, View<const float, 3> vectors, const IndexList& channels, const KeyChannels& copy,
                 int newest, Scores out, Stream s, Scores each) {
  const char* op = "channel_dot";
  check_kv(kv, op, s);
  check_channels(kv, copy, op, s);
  check_kv_scores(kv, out, "out", op, s);
  if (each) check_scores(kv, each, "each", op, s);
  check_vectors(kv, vectors, each ? each.extent[1] : kv.kv_heads, op);
  check_list_of(kv, channels, op);
  check_newest(newest, op);
  if (s.device() == Device::cuda) return on_cuda<channel_dot>(kv, vectors, channels, copy, newest, out, s, each);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      for (int i = 0; i < channels.count(channels.at(r), h); ++i)
        if (const int d = channels.index(channels.at(r), h, i); d < 0 || d >= kv.head_dim)
          fail(Errc::internal, op,
               "got channel " + std::to_string(d) + " in a list, wanted one of " + std::to_string(kv.head_dim));
  const int group = static_cast<int>(vectors.extent[1]) / kv.kv_heads;
#pragma omp parallel for collapse(2) schedule(dynamic) if (worth_threads(kv.rows * kv.kv_heads * longest(kv)))
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int n = kv.tokens(r, h);
      const std::int64_t at = channels.at(r);
      for (int first = 0; first < n; first += block) {
        const int count = std::min(block, n - first);
        float* total = &out(r, h, first);
        if (each) std::fill_n(total, count, 0.f);
        for (int q = h * group; q < (h + 1) * group; ++q) {
          float* sums = each ? &each(r, q, first) : total;
          std::fill_n(sums, count, 0.f);
          for (int i = 0; i < channels.count(at, h); ++i) {
            const int d = channels.index(at, h, i);
            const std::byte* channel = copy.at(kv.slots[r], h, first / block, d);
            if (copy.dtype == DType::f32)
              add_channel(reinterpret_cast<const float*>(channel), count, vectors(r, q, d), sums);
            else
              add_channel(reinterpret_cast<const bf16*>(channel), count, vectors(r, q, d), sums);
          }
          if (each) add_channel(sums, count, 1.f, total);
        }
      }
      for (int t = n - std::min(n, newest); t < n; ++t) out(r, h, t) = std::numeric_limits<float>::infinity();
    }
}

}  // namespace kvlab::ops
