// The op of kvlab/query_shares.hpp in plain loops.
#include "ops/score/query_shares.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/page/reference.hpp"
#include "ops/page/row_products.hpp"

namespace kvlab::ops {
namespace {

using Row = std::vector<double>;

// Number i of Sebastiano Vigna's SplitMix64 that starts at a state.
std::uint64_t number(std::uint64_t state, std::uint64_t i) {
  std::uint64_t z = state + 0x9e3779b97f4a7c15 * (i + 1);
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}

// The shares of a row of logits, of which those of -inf are not seen.
Row softmax(Row x) {
  double most = -std::numeric_limits<double>::infinity(), total = 0;
  for (const double y : x) most = std::max(most, y);
  for (double& y : x) total += y = std::isfinite(y) ? std::exp(y - most) : 0;
  for (double& y : x) y = total > 0 ? y / total : 0;
  return x;
}

}  // namespace

void query_shares_reference(const View<const float, 4>& q, const PagedKv& kv, const QueryShares& how, double level,
                            Scores out) {
  const int group = static_cast<int>(q.extent[1]) / kv.kv_heads, window = static_cast<int>(q.extent[2]);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const auto n = static_cast<std::size_t>(kv.tokens(r, h)), dim = static_cast<std::size_t>(kv.head_dim);
      std::vector<float> keys(n * dim);
      std::vector<std::int32_t> position(n);
      gather_rows_reference(kv, r, h, KvSide::key, kv.tokens(r, h), keys.data());
      token_positions_reference(kv, r, h, kv.tokens(r, h), position.data());
      const RowProducts products(keys, kv.head_dim);
      Row all(n);
      for (int i = 0; i < window; ++i) {
        const auto sees = [&](std::size_t t) {
          return !how.seen || position[t] < how.seen[r] - (how.alike ? 0 : window - 1 - i);
        };
        Row mean(n);
        double seen = 0;
        for (std::size_t t = 0; t < n; ++t) seen += sees(t);
        for (int g = 0; g < group; ++g) {
          Row x(n, -std::numeric_limits<double>::infinity());
          const Row product = products.with([&](std::size_t d) {
            return double{q(how.of_slots ? kv.slots[r] : r, h * group + g, i, static_cast<std::int64_t>(d))};
          });
          for (std::size_t t = 0; t < n; ++t) {
            if (!sees(t)) continue;
            x[t] = product[t] / std::sqrt(static_cast<double>(dim));
            if (how.noise) {
              const std::uint64_t key = how.noise[(r * group + g) * window + i];
              const std::uint64_t draw =
                  number(number(key, static_cast<std::uint64_t>(h)), static_cast<std::uint64_t>(position[t])) >> 40;
              const float u = static_cast<float>(static_cast<double>(draw) / 16777216.0) + 0x1p-26f;
              x[t] -= std::log(-std::log(double{u}));
            }
            if (how.temperature) x[t] /= double{how.temperature[r]};
          }
          const Row share = softmax(x);
          for (std::size_t t = 0; t < n; ++t) switch (how.rule) {
              case ShareRule::sum: all[t] += share[t]; break;
              case ShareRule::max: all[t] = std::max(all[t], share[t]); break;
              case ShareRule::below_mean: mean[t] += share[t] / group; break;
              case ShareRule::below_each: all[t] += sees(t) && share[t] < level / seen ? 1 : 0; break;
            }
        }
        for (std::size_t t = 0; how.rule == ShareRule::below_mean && t < n; ++t)
          all[t] += sees(t) && mean[t] < level / seen ? 1 : 0;
      }
      for (std::size_t t = 0; t < n; ++t) out(r, h, static_cast<std::int64_t>(t)) = static_cast<float>(all[t]);
    }
}

}  // namespace kvlab::ops
