// HeteroCache's division of a prompt's tokens (section 4.2, equations 7 and 8).
#pragma once
#include <kvlab/statistics.hpp>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace heterocache {

constexpr double rounding = 1e-6;  // tokens; errors of double are far below

// L_base: the tokens that a compressed head keeps in the mean. A budget is tokens of a KV head, the mean of all heads;
// that of a ratio is ratio * n, with its fraction. Of `heads`, `full` keep the whole prompt of n tokens. 0 if the
// budget pays for no more than those.
inline int base_of(std::size_t heads, std::size_t full, int n, double budget) {
  const double rest = static_cast<double>(heads) * std::min<double>(budget, n) - static_cast<double>(full) * n;
  if (heads == full || rest <= rounding) return heads == full ? n : 0;
  return std::clamp(static_cast<int>(rest / static_cast<double>(heads - full) + rounding), 1, n);
}

// The tokens of each head. weights: 0 = the head keeps all n. The others divide `base` tokens per head by weight. What
// exceeds n goes to the others with `fill`, and is lost without it.
inline std::vector<std::int32_t> divided(const std::vector<double>& weights, int base, int n, bool fill) {
  std::vector<double> own;
  for (const double w : weights)
    if (w > 0) own.push_back(w);
  const double total = static_cast<double>(own.size()) * base / n;
  double sum = 0;
  for (const double w : own) sum += w;
  if (fill)
    own = kvlab::divided(own, total);
  else
    for (double& w : own) w *= total / sum;
  std::vector<std::int32_t> tokens;
  auto share = own.begin();
  for (const double w : weights)
    tokens.push_back(w > 0 ? std::clamp(static_cast<std::int32_t>(*share++ * n + rounding), 1, n) : n);
  return tokens;
}

}  // namespace heterocache
