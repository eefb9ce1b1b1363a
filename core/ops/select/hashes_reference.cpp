#include <cmath>
#include <vector>

#include "ops/page/reference.hpp"
#include "ops/select/hashes.hpp"

namespace kvlab::ops {
namespace {

std::vector<int> codes_of(const std::vector<float>& x, const KeyHashes& h, int head) {
  std::vector<int> codes;
  for (std::int64_t table = 0; table < h.planes.extent[3]; ++table) {
    int code = 0;
    for (std::int64_t bit = 0; bit < h.planes.extent[2]; ++bit) {
      double side = 0;
      for (std::size_t d = 0; d < x.size(); ++d) side += double{x[d]} * double{h.planes(head, d, bit, table)};
      if (side > 0) code += 1 << bit;
    }
    codes.push_back(code);
  }
  return codes;
}

// Trial by trial: chance[i] of i successes so far, the last one of `least` or more.
double chance_of(double success, int trials, int least) {
  std::vector<double> chance(static_cast<std::size_t>(least) + 1);
  chance[0] = 1;
  for (int i = 0; i < trials; ++i)
    for (int k = least; k >= 0; --k) {
      double& x = chance[static_cast<std::size_t>(k)];
      x = (k == least ? x : x * (1 - success)) + (k > 0 ? chance[static_cast<std::size_t>(k) - 1] * success : 0);
    }
  return chance.back();
}

}  // namespace

void hash_keys_reference(const PagedKv& kv, int from, int to, const KeyHashes& h) {
  const auto dim = static_cast<std::size_t>(kv.head_dim);
  for (int r = 0; r < kv.rows; ++r)
    for (int head = 0; head < kv.kv_heads; ++head) {
      const int slot = kv.slots[r], end = to > from ? to : from;
      std::vector<float> keys(static_cast<std::size_t>(end) * dim);
      gather_rows_reference(kv, r, head, KvSide::key, end, keys.data());
      h.bound(slot, head, 0) = from, h.bound(slot, head, 1) = end;
      for (std::size_t d = 0; d < dim; ++d) {
        double sum = 0;
        for (int t = from; t < end; ++t) sum += double{keys[static_cast<std::size_t>(t) * dim + d]};
        h.mean(slot, head, d) = end > from ? static_cast<float>(sum / (end - from)) : 0.f;
      }
      for (int t = from; t < end; ++t) {
        std::vector<float> centred;
        for (std::size_t d = 0; d < dim; ++d)
          centred.push_back(keys[static_cast<std::size_t>(t) * dim + d] - h.mean(slot, head, d));
        const std::vector<int> codes = codes_of(centred, h, head);
        for (std::size_t i = 0; i < codes.size(); ++i) h.code(slot, head, t, i) = static_cast<std::int16_t>(codes[i]);
      }
    }
}

void collision_weights_reference(const PagedKv& kv, View<const float, 3> queries, const Collisions& rule,
                                 const KeyHashes& h, Scores out) {
  const double pi = std::acos(-1.);
  const auto dim = static_cast<std::size_t>(kv.head_dim);
  const int group = static_cast<int>(queries.extent[1]) / kv.kv_heads, bits = static_cast<int>(h.planes.extent[2]);
  for (int r = 0; r < kv.rows; ++r)
    for (int q = 0; q < queries.extent[1]; ++q) {
      const int head = q / group, slot = kv.slots[r], tokens = kv.tokens(r, head);
      std::vector<float> keys(static_cast<std::size_t>(tokens) * dim), query;
      gather_rows_reference(kv, r, head, KvSide::key, tokens, keys.data());
      for (std::size_t d = 0; d < dim; ++d) query.push_back(queries(r, q, d));
      const std::vector<int> wanted = codes_of(query, h, head);
      for (int t = 0; t < tokens; ++t) {
        out(r, q, t) = 1;
        if (t < h.bound(slot, head, 0) || t >= h.bound(slot, head, 1)) continue;
        int equal = 0;
        for (std::size_t i = 0; i < wanted.size(); ++i) equal += h.code(slot, head, t, i) == wanted[i];
        out(r, q, t) = 0;
        if (equal < rule.least) continue;
        double dot = 0, of_query = 0, of_key = 0;
        for (std::size_t d = 0; d < dim; ++d) {
          const double x = query[d], y = keys[static_cast<std::size_t>(t) * dim + d] - h.mean(slot, head, d);
          dot += x * y, of_query += x * x, of_key += y * y;
        }
        const double lengths = std::sqrt(of_query * of_key), cosine = lengths > 0 ? dot / lengths : 0;
        const double bit = 1 - std::acos(std::fmin(std::fmax(cosine, -1), 1)) / pi;
        const double chance = chance_of(std::pow(bit, bits), static_cast<int>(wanted.size()), rule.least);
        out(r, q, t) = static_cast<float>(1 / (chance + double{rule.floor}));
      }
    }
}

}  // namespace kvlab::ops
