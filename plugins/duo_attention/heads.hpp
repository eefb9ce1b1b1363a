// The heads that keep everything.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <string>
#include <vector>

#include <kvlab/error.hpp>

namespace duo_attention {

// True for the heads whose gate reaches the quantile `sparsity` of all gates, as numpy interpolates it. The authors add
// noise below 1e-6 to tell equal gates apart. Here the earlier of equal heads comes first. Sparsity 1
// leaves no head, and gates are cut to 0 to 1, as in their code.
inline std::vector<bool> retrieval_heads(const std::vector<float>& gates, double sparsity) {
  std::vector<bool> retrieval(gates.size());
  if (sparsity >= 1 || gates.empty()) return retrieval;
  for (std::size_t i = 0; i < gates.size(); ++i)
    if (!std::isfinite(gates[i]))
      throw kvlab::Error(kvlab::Errc::config, "got the gate " + std::to_string(gates[i]) + " of KV head " +
                                                  std::to_string(i) + ", counted over all layers, wanted a number");
  std::vector<std::size_t> order(gates.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto gate = [&](std::size_t i) { return std::clamp(gates[i], 0.f, 1.f); };
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return gate(a) > gate(b); });
  const auto last = static_cast<double>(gates.size() - 1);
  order.resize(gates.size() - static_cast<std::size_t>(std::ceil(sparsity * last)));
  for (const std::size_t head : order) retrieval[head] = true;
  return retrieval;
}

}  // namespace duo_attention
