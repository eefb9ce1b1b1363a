#include "ops/select/sketch.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/made_up.hpp"
#include "ops/page/paged.hpp"
#include "ops/select/select.hpp"
#include "ops/select/surplus.hpp"

namespace kvlab::ops {
namespace {

void check_sketch(const PagedKv& kv, const SketchRule& rule, const KvSketch& to, const char* op, Stream s) {
  if (rule.clusters < 1 || rule.samples < 1 || rule.values < 1 || !(rule.radius >= 0))
    fail(Errc::internal, op,
         "got " + std::to_string(rule.clusters) + " clusters of " + std::to_string(rule.samples) + " samples, " +
             std::to_string(rule.values) + " values and radius " + std::to_string(rule.radius) +
             ", wanted at least one of each and a radius of 0 or more");
  check_made_up(kv, to.tokens, op, s);
  const std::int64_t slots = to.tokens.weights.extent[0], heads = kv.kv_heads;
  if (to.tokens.weights.extent[2] != rule.tokens() ||
      to.centre.extent != std::array{slots, heads, std::int64_t{rule.clusters}, std::int64_t{kv.head_dim}} ||
      to.count.extent != std::array{slots, heads, std::int64_t{1} + rule.clusters} ||
      to.squares.extent != std::array{slots, heads, std::int64_t{1} + rule.values} || to.key.extent[0] != slots ||
      to.centre.stride[3] != 1 || to.count.stride[2] != 1 || to.squares.stride[2] != 1)
    fail(Errc::internal, op, "got a sketch of another shape, wanted that of the rule and of this cache's KV heads");
}

double squared_distance(const float* a, const float* b, int dim) {
  double sum = 0;
  for (int d = 0; d < dim; ++d) {
    const double x = double{a[d]} - double{b[d]};
    sum += x * x;
  }
  return sum;
}

// One token joins. draws: the start of its sequence.
void join(const SketchRule& rule, std::uint64_t draws, const float* key, const float* value, int dim,
          const KvSketch& to, std::int64_t slot, std::int64_t head) {
  std::int32_t *made = &to.count(slot, head, 0), *size = made + 1;
  double least = std::numeric_limits<double>::infinity();
  int cluster = 0;
  for (int c = 0; c < *made; ++c)
    if (const double x = squared_distance(key, &to.centre(slot, head, c, 0), dim); x < least) least = x, cluster = c;
  if (opens_cluster(rule, *made, least)) {
    cluster = (*made)++;
    size[cluster] = 0;
    std::copy_n(key, dim, &to.centre(slot, head, cluster, 0));
  }
  const int n = ++size[cluster];
  for (int i = 0; i < rule.samples; ++i)
    if (replaces_key(sketch_draw(draws, i), n))
      std::copy_n(key, dim, &to.tokens.keys(slot, head, std::int64_t{cluster} * rule.samples + i, 0));
  double square = 0, *squares = &to.squares(slot, head, 0);
  for (int d = 0; d < dim; ++d) square += double{value[d]} * double{value[d]};
  const double mu = squares[0] += square;
  for (int j = 0; j < rule.values; ++j) {
    if (!replaces_value(sketch_draw(draws, rule.samples + j), square, mu)) continue;
    const std::int64_t token = std::int64_t{rule.clusters} * rule.samples + j;
    std::copy_n(key, dim, &to.tokens.keys(slot, head, token, 0));
    for (int d = 0; d < dim; ++d) to.tokens.values(slot, head, token, d) = value[d] * numerator_factor;
    squares[1 + j] = square;
  }
}

void sketch_head(const PagedKv& kv, const Surplus& x, const SketchRule& rule, const KvSketch& to, int row, int head) {
  thread_local std::vector<char> leaves;
  thread_local std::vector<std::int32_t> position;
  const int n = kv.tokens(row, head);
  const std::int64_t slot = kv.slots[row];
  if (find_surplus(kv, x, row, head, position, leaves) == 0) return;
  const std::uint64_t start = split_mix(to.key(slot), head);
  std::vector<float> key(static_cast<std::size_t>(kv.head_dim)), value(key);
  for (int t = 0; t < n; ++t) {
    if (!leaves[static_cast<std::size_t>(t)]) continue;
    const PageEntry& e = kv.entry(row, head, t / kv.page_size);
    read_row(kv.frame(e), kv.layout(e), KvSide::key, t % kv.page_size, key.data());
    read_row(kv.frame(e), kv.layout(e), KvSide::value, t % kv.page_size, value.data());
    join(rule, split_mix(start, position[static_cast<std::size_t>(t)]), key.data(), value.data(), kv.head_dim, to, slot,
         head);
  }
  for (std::int64_t i = 0; i < rule.tokens(); ++i)
    to.tokens.weights(slot, head, i) = sketch_weight(rule, &to.count(slot, head, 0), &to.squares(slot, head, 0), i);
}

}  // namespace

void sketch_surplus(const PagedKv& kv, const Surplus& surplus, const SketchRule& rule, const std::uint64_t* keys,
                    const KvSketch& to, Stream s) {
  const char* op = "sketch_surplus";
  resident_cache(&kv, op, s);
  if (kv.rope != RopeRegime::original)
    fail(Errc::unsupported, op,
         "got keys that RoPE turns by rank, wanted RopeRegime::original: a token of a sketch has no rank");
  check_surplus(kv, surplus, op, s);
  check_sketch(kv, rule, to, op, s);
  if (s.device() == Device::cuda) return on_cuda<sketch_surplus>(kv, surplus, rule, keys, to, s);
  for (int row = 0; keys && row < kv.rows; ++row) to.key(kv.slots[row]) = keys[row];
#pragma omp parallel for collapse(2) schedule(dynamic) if (worth_threads(kv.rows * kv.kv_heads * longest(kv)))
  for (int row = 0; row < kv.rows; ++row)
    for (int head = 0; head < kv.kv_heads; ++head) sketch_head(kv, surplus, rule, to, row, head);
}

}  // namespace kvlab::ops
