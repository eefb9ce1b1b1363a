#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

#include "ops/attend/attend.hpp"
#include "ops/page/check.hpp"
#include "ops/page/reference.hpp"
#include "ops/page/row_products.hpp"

namespace kvlab::ops {
namespace {

// What a KV head holds. All of its query heads read it.
struct HeadContent {
  int tokens;
  RowProducts keys;
  std::vector<float> values;
  std::vector<std::int32_t> position;

  HeadContent(const AttendArgs& a, int row, int head)
      : tokens(a.kv.tokens(row, head)),
        keys(clamped(a, row, head), a.kv.head_dim),
        values(rows(a.kv, row, head, KvSide::value)),
        position(tokens) {
    token_positions_reference(a.kv, row, head, tokens, position.data());
  }
  // Keys, turned on where they lie too far.
  static std::vector<float> clamped(const AttendArgs& a, int row, int head) {
    std::vector<float> out = rows(a.kv, row, head, KvSide::key);
    if (a.most_distance <= 0) return out;
    std::vector<std::int32_t> at(static_cast<std::size_t>(a.kv.tokens(row, head)));
    token_positions_reference(a.kv, row, head, static_cast<int>(at.size()), at.data());
    RopeTable rope = a.kv.rope_table;
    rope.attention_scale = 1;
    for (std::size_t t = 0; t < at.size(); ++t)
      if (const int beyond = a.last[row] - a.most_distance - at[t]; beyond > 0)
        rotate_reference(&out[t * static_cast<std::size_t>(a.kv.head_dim)], rope, beyond);
    return out;
  }
  static std::vector<float> rows(const PagedKv& kv, int row, int head, KvSide side) {
    std::vector<float> out(std::size_t(kv.tokens(row, head)) * kv.head_dim);
    gather_rows_reference(kv, row, head, side, kv.tokens(row, head), out.data());
    return out;
  }
};

void attend_query(const AttendArgs& a, const HeadContent& content, int row, int query_head, double scale) {
  const PagedKv& kv = a.kv;
  const auto& [tokens, keys, values, position] = content;
  const int group = static_cast<int>(a.queries.extent[1]) / kv.kv_heads, head = query_head / group, dim = kv.head_dim;
  std::vector<char> seen(tokens, 1);
  if (a.pages) {
    seen.assign(tokens, 0);
    for (int i = 0; i < a.pages->count(row, head); ++i)
      for (int t = 0; t < kv.page_size; ++t) {
        const int place = a.pages->index(row, head, i) * kv.page_size + t;
        if (place < tokens) seen[place] = 1;
      }
  }
  if (a.tokens) {
    seen.assign(tokens, 0);
    for (int i = 0; i < a.tokens->count(row, head); ++i) seen[a.tokens->index(row, head, i)] = 1;
  }
  if (a.window > 0)
    for (int t = 0; t < tokens; ++t)
      if (position[t] <= a.last[row] - a.window) seen[t] = 0;
  if (a.masks)
    for (int t = 0; t < tokens; ++t)
      if (a.masks[head].hides(position[t], a.last[row])) seen[t] = 0;

  std::vector<double> weight = keys.with([&](std::size_t d) { return double{a.queries(row, query_head, d)}; });
  std::vector<double> out(dim, 0);
  double maximum = -std::numeric_limits<double>::infinity(), total = 0;
  for (int t = 0; t < tokens; ++t) {
    weight[t] *= scale;
    if (a.bias) weight[t] += double{a.bias(row, query_head, t)};
    if (seen[t] && weight[t] > maximum) maximum = weight[t];
  }
  if (float* to = a.logits.of(row, kv.slots[row], head, tokens))
    for (int t = 0; t < tokens; ++t)
      to[t * group + query_head % group] =
          seen[t] ? static_cast<float>(weight[t] * std::numbers::log2e) : -std::numeric_limits<float>::infinity();
  for (int t = 0; t < tokens; ++t) {
    weight[t] = seen[t] && maximum != -INFINITY ? std::exp(weight[t] - maximum) : 0;
    total += weight[t];
    for (int d = 0; d < dim; ++d) out[d] += weight[t] * values[std::size_t(t) * dim + d];
  }
  for (int d = 0; d < dim; ++d) a.out(row, query_head, d) = static_cast<float>(total != 0 ? out[d] / total : 0);
  if (a.lse) a.lse(row, query_head) = static_cast<float>(total != 0 ? maximum + std::log(total) : maximum);
  if (a.mass)
    for (int t = 0; t < a.mass.extent[2]; ++t)
      a.mass(row, query_head, t) = static_cast<float>(t < tokens && total != 0 ? weight[t] / total : 0);
}

}  // namespace

void attend_reference(const AttendArgs& a) {
  check_kv(a.kv, "attend_reference");
  const double scale = a.softmax_scale > 0 ? a.softmax_scale : 1 / std::sqrt(static_cast<double>(a.kv.head_dim));
  const int group = static_cast<int>(a.queries.extent[1]) / a.kv.kv_heads;
  for (int r = 0; r < a.kv.rows; ++r)
    for (int head = 0; head < a.kv.kv_heads; ++head) {
      const HeadContent content(a, r, head);
      for (int q = head * group; q < (head + 1) * group; ++q) attend_query(a, content, r, q, scale);
    }
}

}  // namespace kvlab::ops
