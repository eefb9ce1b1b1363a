#include "ops/select/hashes.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "base/device_op.hpp"
#include "base/per_thread.hpp"
#include "ops/page/check.hpp"
#include "ops/page/paged.hpp"

namespace kvlab::ops {
namespace {

void check_hashes(const PagedKv& kv, const KeyHashes& h, const char* op) {
  const std::int64_t slots = h.bound.extent[0], heads = kv.kv_heads, dim = kv.head_dim, tables = h.code.extent[3];
  if (!h.planes || h.mean.extent != std::array{slots, heads, dim} || h.mean.stride[2] != 1 ||
      h.bound.extent != std::array{slots, heads, std::int64_t{2}} || h.code.extent[0] != slots ||
      h.code.extent[1] != heads || tables < 1 || h.code.stride[3] != 1 || h.planes.extent[0] != heads ||
      h.planes.extent[1] != dim || h.planes.extent[3] != tables || h.planes.stride[3] != 1 ||
      h.planes.stride[2] != tables)
    fail(Errc::internal, op, "got hashes of another shape, wanted those of this cache's KV heads");
  if (h.planes.extent[2] < 1 || h.planes.extent[2] > 15)
    fail(Errc::internal, op, "got codes of " + std::to_string(h.planes.extent[2]) + " bits, wanted 1 to 15");
  if (kv.rope == RopeRegime::cache_relative)
    fail(Errc::unsupported, op, "got keys before RoPE (cache_relative), wanted keys that are stored as rotated");
}

std::size_t sums_of(const KeyHashes& h) { return static_cast<std::size_t>(h.planes.extent[2] * h.planes.extent[3]); }

// A vector's code in each table. sums: [sums_of(h)], scratch.
void hash_vector(const float* x, const KeyHashes& h, std::int64_t head, std::span<double> sums, std::int16_t* codes) {
  const std::int64_t dim = h.planes.extent[1], bits = h.planes.extent[2], tables = h.planes.extent[3];
  std::fill(sums.begin(), sums.end(), 0.);
  for (std::int64_t d = 0; d < dim; ++d) {
    const double element = x[d];
    const float* plane = &h.planes(head, d, 0, 0);
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += element * double{plane[i]};
  }
  for (std::int64_t t = 0; t < tables; ++t) {
    int code = 0;
    for (std::int64_t b = 0; b < bits; ++b) code |= (sums[static_cast<std::size_t>(b * tables + t)] > 0) << b;
    codes[t] = static_cast<std::int16_t>(code);
  }
}

void hash_head(const PagedKv& kv, int row, int head, int from, int to, const KeyHashes& h) {
  const std::int64_t slot = kv.slots[row], dim = kv.head_dim;
  float* mean = &h.mean(slot, head, 0);
  std::vector<float> keys(static_cast<std::size_t>(to * dim));
  if (to > from) gather_rows(kv, row, head, KvSide::key, to, keys.data());
  std::vector<double> sum(static_cast<std::size_t>(dim));
  for (std::int64_t t = from; t < to; ++t)
    for (std::int64_t d = 0; d < dim; ++d)
      sum[static_cast<std::size_t>(d)] += double{keys[static_cast<std::size_t>(t * dim + d)]};
  for (std::int64_t d = 0; d < dim; ++d)
    mean[d] = to > from ? static_cast<float>(sum[static_cast<std::size_t>(d)] / (to - from)) : 0.f;
  h.bound(slot, head, 0) = from, h.bound(slot, head, 1) = to;
  PerThread<double> room(sums_of(h));
#pragma omp parallel if (worth_threads((to - from) * dim))
  {
    const auto sums = room.own();
#pragma omp for schedule(static)
    for (std::int64_t t = from; t < to; ++t) {
      float* key = keys.data() + t * dim;
      for (std::int64_t d = 0; d < dim; ++d) key[d] -= mean[d];
      hash_vector(key, h, head, sums, &h.code(slot, head, t, 0));
    }
  }
}

double squares_of(const float* x, std::int64_t dim) {
  double sum = 0;
  for (std::int64_t d = 0; d < dim; ++d) sum += double{x[d]} * double{x[d]};
  return sum;
}

// What a sampled token counts as. key: as the cache decodes it.
float weight_of(const float* query, const float* key, const float* mean, const Collisions& rule, const KeyHashes& h) {
  const std::int64_t dim = h.planes.extent[1];
  double dot = 0, squares = 0;
  for (std::int64_t d = 0; d < dim; ++d) {
    const float centred = key[d] - mean[d];
    dot += double{query[d]} * double{centred};
    squares += double{centred} * double{centred};
  }
  const double cosine = cosine_of_pair(dot, squares_of(query, dim), squares);
  const double chance = collision_probability(cosine, static_cast<int>(h.planes.extent[2]),
                                              static_cast<int>(h.planes.extent[3]), rule.least);
  return static_cast<float>(1 / (chance + double{rule.floor}));
}

void weigh_head(const PagedKv& kv, const View<const float, 3>& queries, int row, int head, const Collisions& rule,
                const KeyHashes& h, const Scores& out) {
  const char* op = "collision_weights";
  const std::int64_t slot = kv.slots[row], tables = h.code.extent[3], dim = kv.head_dim;
  const int group = static_cast<int>(queries.extent[1]) / kv.kv_heads, tokens = kv.tokens(row, head);
  const int first = h.bound(slot, head, 0), end = std::min(h.bound(slot, head, 1), tokens);
  std::vector<std::int16_t> codes(static_cast<std::size_t>(group * tables));
  std::vector<double> sums(sums_of(h));
  for (int g = 0; g < group; ++g)
    hash_vector(&queries(row, head * group + g, 0), h, head, sums, codes.data() + g * tables);
  for (int page = first / kv.page_size; page * kv.page_size < end; ++page) check_page(kv, row, head, page, op);
  PerThread<float> keys(static_cast<std::size_t>(dim));
#pragma omp parallel if (worth_threads(tokens * tables))
  {
    const auto key = keys.own();
#pragma omp for schedule(static)
    for (int t = 0; t < tokens; ++t) {
      bool decoded = false;
      for (int g = 0; g < group; ++g) {
        float& weight = out(row, head * group + g, t);
        weight = t < first || t >= end ? 1.f : 0.f;
        if (t < first || t >= end) continue;
        const std::int16_t *own = &h.code(slot, head, t, 0), *wanted = codes.data() + g * tables;
        int equal = 0;
        for (std::int64_t i = 0; i < tables; ++i) equal += own[i] == wanted[i];
        if (equal < rule.least) continue;
        if (!decoded) {
          const PageEntry& e = kv.entry(row, head, t / kv.page_size);
          read_row(kv.frame(e), kv.layout(e), KvSide::key, t % kv.page_size, key.data());
          decoded = true;
        }
        weight = weight_of(&queries(row, head * group + g, 0), key.data(), &h.mean(slot, head, 0), rule, h);
      }
    }
  }
}

}  // namespace

void hash_keys(const PagedKv& kv, int from, int to, const KeyHashes& hashes, Stream s) {
  const char* op = "hash_keys";
  check_kv(kv, op, s);
  check_hashes(kv, hashes, op);
  to = std::max(from, to);
  if (from < 0 || to > hashes.code.extent[2])
    fail(Errc::internal, op,
         "got places " + std::to_string(from) + " to " + std::to_string(to) + ", wanted 0 to " +
             std::to_string(hashes.code.extent[2]) + ", for which there is room");
  if (s.device() == Device::cuda) return on_cuda<hash_keys>(kv, from, to, hashes, s);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      if (to > kv.tokens(r, h))
        fail(Errc::internal, op,
             "got places up to " + std::to_string(to) + ", wanted at most " + std::to_string(kv.tokens(r, h)) +
                 ", the head's tokens");
      if (to > from) check_resident(kv, r, h, op);
      hash_head(kv, r, h, from, to, hashes);
    }
}

void collision_weights(const PagedKv& kv, View<const float, 3> queries, const Collisions& rule, const KeyHashes& hashes,
                       Scores out, Workspace& w, Stream s) {
  const char* op = "collision_weights";
  check_kv(kv, op, s);
  check_hashes(kv, hashes, op);
  check_scores(kv, out, "weights", op, s);
  if (queries.extent[0] < kv.rows || queries.extent[1] % kv.kv_heads || queries.extent[2] != kv.head_dim ||
      queries.stride[2] != 1 || out.extent[1] != queries.extent[1])
    fail(Errc::internal, op,
         "got queries of another shape, wanted [row, query head, head_dim] with the weights' heads");
  if (rule.least < 1 || rule.least > hashes.code.extent[3])
    fail(Errc::internal, op,
         "got " + std::to_string(rule.least) + " tables that must collide, wanted 1 to " +
             std::to_string(hashes.code.extent[3]));
  if (s.device() == Device::cuda) return on_cuda<collision_weights>(kv, queries, rule, hashes, out, w, s);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) weigh_head(kv, queries, r, h, rule, hashes, out);
}

}  // namespace kvlab::ops
