#include "ops/select/chunks.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "base/device_op.hpp"
#include "base/per_thread.hpp"
#include "ops/page/check.hpp"
#include "ops/page/extents.hpp"
#include "ops/page/paged.hpp"

namespace kvlab::ops {
namespace {

void check_chunks(const PagedKv& kv, const KeyChunks& c, const char* op) {
  const std::int64_t slots = c.count.extent[0], heads = kv.kv_heads, room = c.cosine.extent[2];
  if (c.landmark.extent != std::array{slots, heads, room, std::int64_t{kv.head_dim}} || c.landmark.stride[3] != 1 ||
      c.cosine.extent != std::array{slots, heads, room} || c.outlier.extent != c.cosine.extent ||
      c.count.extent[1] != heads || c.size < 1)
    fail(Errc::internal, op,
         "got chunks of " + std::to_string(c.size) + " keys with landmarks " + extents(c.landmark) +
             ", wanted those of " + std::to_string(heads) + " KV heads, head_dim " + std::to_string(kv.head_dim));
}

void chunk_head(const PagedKv& kv, int row, int head, int local, int outliers, const KeyChunks& out) {
  const std::int64_t slot = kv.slots[row], dim = kv.head_dim;
  const auto count = static_cast<int>(chunks_of(kv.tokens(row, head), out.size, local, out.cosine.extent[2]));
  out.count(slot, head) = count;
  if (count == 0) return;
  std::vector<float> keys(static_cast<std::size_t>(count) * static_cast<std::size_t>(out.size * dim));
  gather_rows(kv, row, head, KvSide::key, count * out.size, keys.data());
  std::vector<int> order;
  std::vector<double> sum(static_cast<std::size_t>(dim));
  for (int c = 0; c < count; ++c) {
    const float* of_chunk = keys.data() + std::int64_t{c} * out.size * dim;
    std::fill(sum.begin(), sum.end(), 0);
    for (int t = 0; t < out.size; ++t)
      for (std::int64_t d = 0; d < dim; ++d) sum[static_cast<std::size_t>(d)] += double{of_chunk[t * dim + d]};
    float* landmark = &out.landmark(slot, head, c, 0);
    double aa = 0;
    for (std::int64_t d = 0; d < dim; ++d) {
      landmark[d] = static_cast<float>(sum[static_cast<std::size_t>(d)] / out.size);
      aa += double{landmark[d]} * double{landmark[d]};
    }
    float least = INFINITY;
    for (int t = 0; t < out.size; ++t) {
      double ab = 0, bb = 0;
      for (std::int64_t d = 0; d < dim; ++d) {
        const double x = of_chunk[t * dim + d];
        ab += double{landmark[d]} * x, bb += x * x;
      }
      least = std::min(least, cosine_of(ab, aa, bb));
    }
    out.cosine(slot, head, c) = least;
    out.outlier(slot, head, c) = 0;
    order.push_back(c);
  }
  std::sort(order.begin(), order.end(),
            [&](int a, int b) { return comes_before(-out.cosine(slot, head, a), a, -out.cosine(slot, head, b), b); });
  for (int i = 0; i < std::min(outliers, count); ++i) out.outlier(slot, head, order[static_cast<std::size_t>(i)]) = 1;
}

}  // namespace

void chunk_keys(const PagedKv& kv, int local, int outliers, const KeyChunks& chunks, Stream s) {
  const char* op = "chunk_keys";
  check_kv(kv, op, s);
  check_chunks(kv, chunks, op);
  if (local < 0 || outliers < 0)
    fail(Errc::internal, op,
         "got " + std::to_string(local) + " local chunks and " + std::to_string(outliers) +
             " outliers, wanted at least 0 of each");
  if (kv.rope == RopeRegime::cache_relative)
    fail(Errc::unsupported, op, "got keys before RoPE (cache_relative), wanted keys that are stored as rotated");
  if (s.device() == Device::cuda) return on_cuda<chunk_keys>(kv, local, outliers, chunks, s);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      if (kv.tokens(r, h) / chunks.size - local > chunks.cosine.extent[2])
        fail(Errc::internal, op,
             "got " + std::to_string(kv.tokens(r, h) / chunks.size - local) + " chunks, wanted at most " +
                 std::to_string(chunks.cosine.extent[2]) + ", for which there is room");
  resident_cache(&kv, op, s);
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) chunk_head(kv, r, h, local, outliers, chunks);
}

void chunk_scores(const PagedKv& kv, View<const float, 3> queries, float scale, GroupRule rule, const KeyChunks& chunks,
                  Scores out, Workspace& w, Stream s) {
  const char* op = "chunk_scores";
  check_kv(kv, op, s);
  check_chunks(kv, chunks, op);
  if (queries.extent[0] < kv.rows || queries.extent[1] % kv.kv_heads || queries.extent[1] < 1 ||
      queries.extent[2] != kv.head_dim || queries.stride[2] != 1)
    fail(Errc::internal, op,
         "got queries " + extents(queries) + ", wanted [row, query head, " + std::to_string(kv.head_dim) + "], dense");
  if (out.extent[0] < kv.rows || out.extent[1] != kv.kv_heads || out.extent[2] < chunks.cosine.extent[2])
    fail(Errc::internal, op,
         "got scores " + extents(out) + ", wanted [row, kv_head, " + std::to_string(chunks.cosine.extent[2]) +
             " chunks]");
  if (rule != GroupRule::max && rule != GroupRule::mean)
    fail(Errc::unsupported, op, "got another rule of the group, wanted max or mean");
  if (s.device() == Device::cuda) return on_cuda<chunk_scores>(kv, queries, scale, rule, chunks, out, w, s);
  const std::int64_t group = queries.extent[1] / kv.kv_heads;
  PerThread<double> room(static_cast<std::size_t>(2 * chunks.cosine.extent[2]));
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const std::int64_t slot = kv.slots[r];
      const int count = chunks.count(slot, h);
      const auto share = room.own().first(room.own().size() / 2), joined = room.own().last(share.size());
      std::fill(joined.begin(), joined.end(), 0.);
      for (std::int64_t g = h * group; g < (h + 1) * group; ++g) {
        double most = -INFINITY, sum = 0;
        for (int c = 0; c < count; ++c) {
          if (chunks.outlier(slot, h, c)) continue;
          double dot = 0;
          for (int d = 0; d < kv.head_dim; ++d)
            dot += double{queries(r, g, d)} * double{chunks.landmark(slot, h, c, d)};
          most = std::max(most, share[static_cast<std::size_t>(c)] = double{scale} * dot);
        }
        for (int c = 0; c < count; ++c)
          if (!chunks.outlier(slot, h, c))
            sum += share[static_cast<std::size_t>(c)] = std::exp(share[static_cast<std::size_t>(c)] - most);
        for (int c = 0; c < count; ++c) {
          if (chunks.outlier(slot, h, c)) continue;
          const double x = share[static_cast<std::size_t>(c)] / sum;
          double& to = joined[static_cast<std::size_t>(c)];
          to = rule == GroupRule::max ? (x != x || x > to ? x : to) : to + x / static_cast<double>(group);
        }
      }
      for (int c = 0; c < count; ++c) out(r, h, c) = static_cast<float>(joined[static_cast<std::size_t>(c)]);
    }
}

void chunk_tokens(const PagedKv& kv, View<const float, 3> scores, View<const std::int32_t, 2> most,
                  const KeyChunks& chunks, TokenList list, Stream s) {
  const char* op = "chunk_tokens";
  check_kv(kv, op, s);
  check_chunks(kv, chunks, op);
  check_list(kv, list, op);
  if (scores.data) {
    if (scores.extent[0] < kv.rows || scores.extent[1] != kv.kv_heads || scores.extent[2] < chunks.cosine.extent[2])
      fail(Errc::internal, op,
           "got scores " + extents(scores) + ", wanted [row, kv_head, " + std::to_string(chunks.cosine.extent[2]) +
               " chunks]");
    if (most.extent[0] < kv.rows || most.extent[1] < kv.kv_heads)
      fail(Errc::internal, op, "got numbers of chunks " + extents(most) + ", wanted [row, kv_head]");
  }
  if (s.device() == Device::cuda) return on_cuda<chunk_tokens>(kv, scores, most, chunks, list, s);
  check_room(kv, list, op);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const std::int64_t slot = kv.slots[r];
      const int count = chunks.count(slot, h), n = kv.tokens(r, h);
      std::vector<int> order;
      std::vector<bool> read(static_cast<std::size_t>(count));
      for (int c = 0; c < count; ++c)
        if (chunks.outlier(slot, h, c))
          read[static_cast<std::size_t>(c)] = true;
        else if (scores.data)
          order.push_back(c);
      std::sort(order.begin(), order.end(),
                [&](int a, int b) { return comes_before(scores(r, h, a), a, scores(r, h, b), b); });
      const auto chosen =
          order.empty() ? 0 : std::clamp<std::int64_t>(most(r, h), 0, static_cast<std::int64_t>(order.size()));
      for (std::int64_t i = 0; i < chosen; ++i)
        read[static_cast<std::size_t>(order[static_cast<std::size_t>(i)])] = true;
      int kept = 0;
      for (int t = 0; t < n; ++t)
        if (t / chunks.size >= count || read[static_cast<std::size_t>(t / chunks.size)])
          list.index(list.at(r), h, kept++) = t;
      list.count(list.at(r), h) = kept;
    }
}

}  // namespace kvlab::ops
