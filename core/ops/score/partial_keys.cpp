#include "ops/score/partial_keys.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "base/device_op.hpp"
#include "base/half.hpp"
#include "base/per_thread.hpp"
#include "ops/page/check.hpp"
#include "ops/page/extents.hpp"
#include "ops/page/paged.hpp"
#include "ops/score/newest_keys.hpp"
#include "ops/score/speculation.hpp"

namespace kvlab::ops {
namespace {

void check_directions(const PagedKv& kv, const Directions& x, const char* op) {
  if (x.extent[0] != kv.kv_heads || x.extent[1] != kv.head_dim || x.extent[2] != kv.head_dim || x.stride[2] != 1)
    fail(Errc::internal, op,
         "got directions " + extents(x) + ", wanted [" + std::to_string(kv.kv_heads) + " KV heads, " +
             std::to_string(kv.head_dim) + ", " + std::to_string(kv.head_dim) + "], dense along the last");
}

void check_partial(const PagedKv& kv, const PartialKeys& keys, const char* op, Stream s) {
  const std::int64_t slots = keys.rows.extent[0], heads = kv.kv_heads, count = keys.channels.extent[2];
  if (keys.directions) check_directions(kv, keys.directions, op);
  if (!keys.rows || keys.rows.extent[1] != heads || keys.rows.extent[3] != count || keys.rows.stride[3] != 1 ||
      keys.channels.extent[0] != slots || keys.channels.extent[1] != heads || count < 1 || count > kv.head_dim)
    fail(Errc::internal, op,
         "got partial keys " + extents(keys.rows) + " of channels " + extents(keys.channels) +
             ", wanted [slot, KV head, place, i] and [slot, KV head, i] of this cache's KV heads");
  if (kv.rope == RopeRegime::cache_relative)
    fail(Errc::unsupported, op, "got keys before RoPE (cache_relative), wanted keys that are stored as rotated");
  if (s.device() == Device::cuda) return;
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      if (kv.slots[r] >= slots || kv.tokens(r, h) > keys.rows.extent[2])
        fail(Errc::internal, op,
             "got " + std::to_string(kv.tokens(r, h)) + " tokens of slot " + std::to_string(kv.slots[r]) +
                 ", wanted partial keys that have room for them, " + extents(keys.rows));
      for (std::int64_t i = 0; i < count; ++i)
        if (const int c = keys.channels(kv.slots[r], h, i); c < 0 || c >= kv.head_dim)
          fail(Errc::internal, op,
               "got channel " + std::to_string(c) + ", wanted 0 to " + std::to_string(kv.head_dim - 1));
    }
}

double channel_of(const float* x, const PartialKeys& keys, int head, int channel, int dim) {
  if (!keys.directions) return double{x[channel]};
  const float* direction = &keys.directions(head, channel, 0);
  double sum = 0;
  for (int d = 0; d < dim; ++d) sum += double{x[d]} * double{direction[d]};
  return sum;
}

void score_head(const PagedKv& kv, const View<const float, 3>& queries, int row, int head, const PartialKeys& keys,
                float factor, int newest, const Scores& out) {
  const std::int64_t group = queries.extent[1] / kv.kv_heads;
  const auto count = static_cast<std::size_t>(keys.channels.extent[2]);
  const int slot = kv.slots[row], tokens = kv.tokens(row, head);
  std::vector<float> few;  // [query of the group, i]
  for (std::int64_t g = head * group; g < (head + 1) * group; ++g)
    for (std::size_t i = 0; i < count; ++i)
      few.push_back(
          static_cast<float>(channel_of(&queries(row, g, 0), keys, head, keys.channels(slot, head, i), kv.head_dim)));
  const std::int64_t products = tokens * static_cast<std::int64_t>(few.size());
  PerThread<float> keys_of(count);
#pragma omp parallel if (worth_threads(products))
  {
    const auto key = keys_of.own();
#pragma omp for schedule(static)
    for (int t = 0; t < tokens; ++t) {
      if (t + newest >= tokens) {
        out(row, head, t) = INFINITY;
        continue;
      }
      const std::uint16_t* stored = &keys.rows(slot, head, t, 0);
      for (std::size_t i = 0; i < count; ++i) key[i] = half_to_float(stored[i]);
      float most = -INFINITY;
      for (std::size_t first = 0; first < few.size(); first += count) {
        float sum = 0;
        for (std::size_t i = 0; i < count; ++i) sum += few[first + i] * key[i];
        most = std::fmax(most, sum);
      }
      out(row, head, t) = factor * most;
    }
  }
}

}  // namespace

void add_channel_magnitudes(const PagedKv& kv, const Tensor<4>& of_queries, Directions directions, View<float, 3> sums,
                            Workspace& w, Stream s) {
  const char* op = "add_channel_magnitudes";
  check_kv(kv, op, s);
  check_directions(kv, directions, op);
  const View<const float, 4> queries = queries_and_sums(kv, of_queries, sums, op);
  if (s.device() == Device::cuda) return on_cuda<add_channel_magnitudes>(kv, of_queries, directions, sums, w, s);
  const std::int64_t group = queries.extent[1] / kv.kv_heads;
  const auto dim = static_cast<std::size_t>(kv.head_dim);
  std::vector<float> turned(dim * dim), channels(dim);  // [element, channel]
  std::vector<double> sum(dim);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      for (std::size_t c = 0; c < dim; ++c)
        for (std::size_t d = 0; d < dim; ++d) turned[d * dim + c] = directions(h, c, d);
      std::fill(sum.begin(), sum.end(), 0);
      for (std::int64_t g = h * group; g < (h + 1) * group; ++g)
        for (std::int64_t i = 0; i < queries.extent[2]; ++i) {
          const float* x = &queries(r, g, i, 0);
          std::fill(channels.begin(), channels.end(), 0.f);
          for (std::size_t d = 0; d < dim; ++d)
            for (std::size_t c = 0; c < dim; ++c) channels[c] += x[d] * turned[d * dim + c];
          for (std::size_t c = 0; c < dim; ++c) sum[c] += std::abs(double{channels[c]});
        }
      for (std::size_t c = 0; c < dim; ++c) {
        float& to = sums(kv.slots[r], h, c);
        to = static_cast<float>(double{to} + sum[c]);
      }
    }
}

void copy_partial_keys(const PagedKv& kv, int newest, const PartialKeys& keys, Stream s) {
  const char* op = "copy_partial_keys";
  check_kv(kv, op, s);
  check_partial(kv, keys, op, s);
  check_newest(newest, op);
  if (s.device() == Device::cuda) return on_cuda<copy_partial_keys>(kv, newest, keys, s);
  const std::int64_t count = keys.channels.extent[2];
  const std::int64_t products = count * (keys.directions ? kv.head_dim : 1);
  for_newest_keys(kv, newest, products, op, [&](int r, int h, int t, const float* key) {
    const int slot = kv.slots[r];
    for (std::int64_t i = 0; i < count; ++i)
      keys.rows(slot, h, t, i) =
          float_to_half(in_range_of_half(channel_of(key, keys, h, keys.channels(slot, h, i), kv.head_dim)));
  });
}

void partial_scores(const PagedKv& kv, View<const float, 3> queries, const PartialKeys& keys, float factor, int newest,
                    Scores out, Workspace& w, Stream s) {
  const char* op = "partial_scores";
  check_kv(kv, op, s);
  check_partial(kv, keys, op, s);
  check_kv_scores(kv, out, "scores", op, s);
  if (queries.extent[0] < kv.rows || queries.extent[1] < 1 || queries.extent[1] % kv.kv_heads ||
      queries.extent[2] != kv.head_dim || queries.stride[2] != 1)
    fail(Errc::internal, op, "got queries " + extents(queries) + ", wanted [row, query head, head_dim], dense");
  if (!(factor > 0) || newest < 0)
    fail(Errc::internal, op,
         "got the factor " + std::to_string(factor) + " and " + std::to_string(newest) +
             " newest places, wanted more than 0 and at least 0");
  if (s.device() == Device::cuda) return on_cuda<partial_scores>(kv, queries, keys, factor, newest, out, w, s);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) score_head(kv, queries, r, h, keys, factor, newest, out);
}

void token_pages(const PagedKv& kv, const TokenList& tokens, int newest, PageList out, Stream s) {
  const char* op = "token_pages";
  check_kv(kv, op, s);
  check_list(kv, tokens, op);
  check_list(kv, out, op);
  check_newest(newest, op);
  if (s.device() == Device::cuda) return on_cuda<token_pages>(kv, tokens, newest, out, s);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const std::int64_t from = tokens.at(r), to = out.at(r);
      int count = 0;
      for (int i = 0; i < tokens.count(from, h); ++i) {
        const int page = tokens.index(from, h, i) / kv.page_size;
        if (tokens.index(from, h, i) >= kv.tokens(r, h) - newest) break;
        if (count > 0 && out.index(to, h, count - 1) == page) continue;
        if (count >= out.index.extent[2])
          fail(Errc::internal, op,
               "got more than " + std::to_string(count) + " pages of listed tokens, wanted a list with room for them");
        out.index(to, h, count++) = page;
      }
      out.count(to, h) = count;
    }
}

}  // namespace kvlab::ops
