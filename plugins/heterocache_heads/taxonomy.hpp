// HeteroCache's mathematics: sets of tokens (its section 3 and appendix C.1), star clusters (4.1) and shares of a
// budget (4.2).
#pragma once
#include <kvlab/statistics.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

namespace heterocache {

using Tokens = std::vector<std::int32_t>;  // ascending, without repeats
// Roles as arrays hold them. `shifting` are the paper's volatile heads.
inline constexpr float anchor = 0, shifting = 1, pivot = 2, satellite = 3;

// Average of `kernel` neighbours, an odd number, with stride 1. Zeros beyond each end count in the divisor. NaN ranks
// lowest.
inline std::vector<float> pooled(std::span<const float> row, std::size_t kernel) {
  std::vector<float> out(row.size());
  const std::size_t half = kernel / 2;
  for (std::size_t i = 0; i < row.size(); ++i) {
    const std::size_t begin = i < half ? 0 : i - half, end = std::min(i + half + 1, row.size());
    float sum = 0;
    for (std::size_t j = begin; j < end; ++j) sum += row[j];
    out[i] = std::isnan(sum) ? -std::numeric_limits<float>::infinity() : sum / static_cast<float>(kernel);
  }
  return out;
}

// The k positions with the highest scores, or all; ties go to the lower position.
inline Tokens top(const std::vector<float>& scores, std::size_t k) {
  Tokens order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  if (k < order.size()) {
    const auto score = [&](std::int32_t i) { return scores[static_cast<std::size_t>(i)]; };
    std::nth_element(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(k), order.end(),
                     [&](auto a, auto b) { return score(a) != score(b) ? score(a) > score(b) : a < b; });
    order.resize(k);
    std::sort(order.begin(), order.end());
  }
  return order;
}

// O(A, B), neither of them empty.
inline double overlap(const Tokens& a, const Tokens& b) {
  return kvlab::overlap(a, b) / static_cast<double>(std::min(a.size(), b.size()));
}

// Median (the mean of two middle ones) or mean of the numbers that are not NaN; NaN if there is none.
inline float joined(std::vector<float> numbers, bool mean) {
  std::erase_if(numbers, [](float v) { return std::isnan(v); });
  if (numbers.empty()) return std::numeric_limits<float>::quiet_NaN();
  std::sort(numbers.begin(), numbers.end());
  const std::size_t n = numbers.size();
  const auto sum = std::accumulate(numbers.begin(), numbers.end(), 0.);
  return static_cast<float>(mean ? sum / static_cast<double>(n)
                                 : (double{numbers[(n - 1) / 2]} + double{numbers[n / 2]}) / 2);
}

// Greedy star clusters among the heads that enter. The head with most free neighbours becomes a pivot, and these its
// satellites; ties go to the lower head. Returns the pivot of each head: itself for a pivot, -1 for a head that is left
// over. A head without free neighbours is left over, or with `singles` a pivot without satellites.
inline std::vector<int> star_clusters(const std::vector<std::vector<bool>>& edge, std::vector<bool> enters,
                                      bool singles) {
  const std::size_t heads = edge.size();
  std::vector<int> pivot_of(heads, -1);
  while (true) {
    std::size_t best = heads;
    int most = singles ? -1 : 0;
    for (std::size_t head = 0; head < heads; ++head) {
      int degree = 0;
      for (std::size_t other = 0; other < heads; ++other) degree += other != head && enters[other] && edge[head][other];
      if (enters[head] && degree > most) best = head, most = degree;
    }
    if (best == heads) return pivot_of;
    enters[best] = false;
    pivot_of[best] = static_cast<int>(best);
    for (std::size_t other = 0; other < heads; ++other)
      if (enters[other] && edge[best][other]) enters[other] = false, pivot_of[other] = static_cast<int>(best);
  }
}

struct Roles {
  std::vector<float> role;      // anchor, shifting, pivot or satellite
  std::vector<float> pivot_of;  // a satellite's pivot within its layer, -1 for other heads
};

// Gives all heads their roles, layer by layer. overlaps: [layer, head, head]. A head is similar from tau_sim on, and
// stable from tau_stable on. unique_first: a head that is similar to no other is an anchor or volatile, and the others
// form clusters. Else all heads may form clusters, and those left over are anchors or volatile. The result is NaN if a
// number is missing.
inline Roles roles_of(std::size_t heads, const std::vector<float>& stable, const std::vector<float>& similar,
                      const std::vector<float>& overlaps, float tau_stable, float tau_sim, bool unique_first) {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  Roles out{std::vector<float>(stable.size(), nan), std::vector<float>(stable.size(), nan)};
  for (const auto* numbers : {&stable, &similar, &overlaps})
    if (std::any_of(numbers->begin(), numbers->end(), [](float x) { return std::isnan(x); })) return out;
  for (std::size_t first = 0; first < stable.size(); first += heads) {
    std::vector<bool> enters(heads);
    std::vector<std::vector<bool>> edge(heads, enters);
    for (std::size_t a = 0; a < heads; ++a) {
      enters[a] = !unique_first || similar[first + a] >= tau_sim;
      for (std::size_t b = 0; b < heads; ++b) edge[a][b] = overlaps[(first + a) * heads + b] >= tau_sim;
    }
    const std::vector<int> pivots = star_clusters(edge, enters, unique_first);
    for (std::size_t a = 0; a < heads; ++a) {
      const bool is_pivot = pivots[a] == static_cast<int>(a), is_satellite = pivots[a] >= 0 && !is_pivot;
      out.pivot_of[first + a] = static_cast<float>(is_satellite ? pivots[a] : -1);
      const float unique = stable[first + a] >= tau_stable ? anchor : shifting;
      out.role[first + a] = is_pivot ? pivot : is_satellite ? satellite : unique;
    }
  }
  return out;
}

using kvlab::divided;

// The share of a prompt's tokens that each head of the model keeps, `ratio` in the mean. Volatile heads and pivots keep
// all. The others divide the rest by 1 / stability; NaN for them where nothing is left.
inline std::vector<float> shares(const std::vector<float>& role, const std::vector<float>& stable, double least,
                                 double ratio) {
  std::vector<float> out(role.size(), std::numeric_limits<float>::quiet_NaN());
  std::vector<std::size_t> compressed;
  std::vector<double> weights;
  double rest = ratio * static_cast<double>(role.size());
  for (std::size_t i = 0; i < role.size(); ++i) {
    if (role[i] == anchor || role[i] == satellite)
      compressed.push_back(i), weights.push_back(1 / std::max(double{stable[i]}, least));
    else if (!std::isnan(role[i]))
      out[i] = 1, rest -= 1;
  }
  if (rest < 1e-9) return out;  // rounding leaves less than that
  const std::vector<double> of = divided(weights, rest);
  for (std::size_t i = 0; i < compressed.size(); ++i) out[compressed[i]] = static_cast<float>(of[i]);
  return out;
}

}  // namespace heterocache
