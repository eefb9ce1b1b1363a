// The heads that keep everything.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <string>
#include <vector>

#include <kvlab/error.hpp>

namespace razor_attention {

// Refuses scores that are not those of all KV heads of the model.
inline const std::vector<float>& of_heads(const std::vector<float>& scores, std::size_t heads, const char* what) {
  const auto number = [](float x) { return std::isfinite(x); };
  const auto bad = static_cast<std::size_t>(std::find_if_not(scores.begin(), scores.end(), number) - scores.begin());
  if (scores.size() != heads || bad < heads)
    throw kvlab::Error(kvlab::Errc::config, std::string("got ") +
                                                (scores.size() != heads ? std::to_string(scores.size()) + " scores"
                                                                        : "the score " + std::to_string(scores[bad]) +
                                                                              " of KV head " + std::to_string(bad)) +
                                                " in '" + what + "', wanted a number for each of " +
                                                std::to_string(heads) + " KV heads, counted over all layers");
  return scores;
}

// Marks the `share` of all heads with the greatest scores, rounded. The earlier of equal heads comes first.
inline void mark(const std::vector<float>& scores, double share, std::vector<bool>& marks) {
  std::vector<std::size_t> order(scores.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return scores[a] > scores[b]; });
  order.resize(static_cast<std::size_t>(std::lround(share * static_cast<double>(scores.size()))));
  for (const std::size_t head : order) marks[head] = true;
}

}  // namespace razor_attention
