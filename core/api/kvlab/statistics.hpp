// Tools for profilers, and for policies that read profiles: means per layer and head, values per sequence, best pages,
// divisions by weight, retrieval heads, and common statistics.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvlab/error.hpp"
#include "kvlab/ops.hpp"
#include "kvlab/params.hpp"
#include "kvlab/policy.hpp"
#include "kvlab/profiler.hpp"

namespace kvlab {

// The mean of everything added at each index, e.g. [layer, KV head].
template <int Rank>
class Means {
 public:
  void resize(const std::array<std::int64_t, Rank>& extent) {
    extent_ = extent;
    std::size_t n = 1;
    for (const std::int64_t e : extent) n *= static_cast<std::size_t>(e);
    sum_.assign(n, 0), count_.assign(n, 0);
  }
  void add(const std::array<int, Rank>& index, double value) {
    std::size_t at = 0;
    for (std::size_t i = 0; i < Rank; ++i)
      at = at * static_cast<std::size_t>(extent_[i]) + static_cast<std::size_t>(index[i]);
    sum_.at(at) += value, count_.at(at) += 1;
  }
  // For Profiler::finish; NaN where nothing was added.
  ProfileArray array(std::string unit) const {
    ProfileArray out{{extent_.begin(), extent_.end()}, {}, std::move(unit)};
    for (std::size_t i = 0; i < sum_.size(); ++i)
      out.values.push_back(count_[i] > 0 ? static_cast<float>(sum_[i] / count_[i])
                                         : std::numeric_limits<float>::quiet_NaN());
    return out;
  }

 private:
  std::array<std::int64_t, Rank> extent_{};
  std::vector<double> sum_, count_;
};

// A T for each layer and head of each sequence, kept from step to step.
template <class T>
class PerSequence {
 public:
  void resize(int slots, int layers, int heads) {
    heads_ = static_cast<std::size_t>(heads);
    of_slot_ = static_cast<std::size_t>(layers) * heads_;
    values_.assign(static_cast<std::size_t>(slots) * of_slot_, T{});
  }
  T& at(int slot, int layer, int head) {
    return values_.at(static_cast<std::size_t>(slot) * of_slot_ + static_cast<std::size_t>(layer) * heads_ +
                      static_cast<std::size_t>(head));
  }
  // For Profiler::release.
  void clear(int slot) {
    std::fill_n(values_.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(slot) * of_slot_), of_slot_,
                T{});
  }

 private:
  std::size_t heads_ = 0, of_slot_ = 0;
  std::vector<T> values_;
};

// How many numbers two lists share; both ascending and without repeats.
inline int overlap(std::span<const std::int32_t> a, std::span<const std::int32_t> b) {
  int both = 0;
  for (auto x = a.begin(), y = b.begin(); x != a.end() && y != b.end();) {
    if (*x == *y)
      ++both, ++x, ++y;
    else
      ++(*x < *y ? x : y);
  }
  return both;
}

// Rescales a share of agreement: 0 = no more than `chance`, the share that chance alone gives; 1 = full agreement.
inline double above_chance(double share, double chance) { return std::max(0., (share - chance) / (1 - chance)); }

// Divides `total` by weight so that no share is above 1. The others take what a head cannot, by their weights.
inline std::vector<double> divided(const std::vector<double>& weights, double total) {
  std::vector<std::size_t> order(weights.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return weights[a] > weights[b]; });
  double sum = std::accumulate(weights.begin(), weights.end(), 0.);
  std::vector<double> shares(weights.size());
  for (const std::size_t i : order) {
    const bool full = weights[i] * total >= sum;
    shares[i] = full ? 1 : weights[i] * total / sum;
    if (full) total -= 1, sum -= weights[i];
  }
  return shares;
}

// The retrieval heads of DuoAttention: those whose gate reaches the quantile `sparsity` of all gates, as numpy
// interpolates it. The authors add noise below 1e-6 to tell equal gates apart. Here the earlier of equal heads comes
// first. Sparsity 1 leaves no head, and gates are cut to 0 to 1, as in their code.
inline std::vector<bool> retrieval_heads(const std::vector<float>& gates, double sparsity) {
  std::vector<bool> retrieval(gates.size());
  if (sparsity >= 1 || gates.empty()) return retrieval;
  for (std::size_t i = 0; i < gates.size(); ++i)
    if (!std::isfinite(gates[i]))
      throw Error(Errc::config, "got the gate " + std::to_string(gates[i]) + " of KV head " + std::to_string(i) +
                                    ", counted over all layers, wanted a number");
  std::vector<std::size_t> order(gates.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto gate = [&](std::size_t i) { return std::clamp(gates[i], 0.f, 1.f); };
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return gate(a) > gate(b); });
  const auto last = static_cast<double>(gates.size() - 1);
  order.resize(gates.size() - static_cast<std::size_t>(std::ceil(sparsity * last)));
  for (const std::size_t head : order) retrieval[head] = true;
  return retrieval;
}

// The same of a profile's array `gate`, whose size is checked.
inline std::vector<bool> retrieval_heads(const std::vector<float>& gates, double sparsity, const Shape& shape) {
  const std::size_t heads = static_cast<std::size_t>(shape.layers) * static_cast<std::size_t>(shape.kv_heads);
  if (gates.size() != heads)
    throw Error(Errc::config, "got " + std::to_string(gates.size()) + " gates, wanted " + std::to_string(heads) +
                                  ", one of each KV head");
  return retrieval_heads(gates, sparsity);
}

// Entropy of a probability row, in nats.
inline double entropy(std::span<const float> probabilities) {
  double sum = 0;
  for (const double p : probabilities)
    if (p > 0) sum -= p * std::log(p);
  return sum;
}

// Cosine of two vectors of the same length; 0 if one of them is 0.
inline double cosine(std::span<const float> a, std::span<const float> b) {
  double dot = 0, aa = 0, bb = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    dot += double{a[i]} * b[i], aa += double{a[i]} * a[i], bb += double{b[i]} * b[i];
  return dot / std::sqrt(std::max(aa * bb, 1e-30));
}

// Attention mass (Needs::mass) on a page of a KV head, the mean over its query heads. For profilers, whose views are
// host memory.
inline double page_mass(const LayerKv& kv, int row, int head, int page) {
  const int group = kv.shape->group(), begin = page * kv.shape->page_size;
  const int end = std::min(begin + kv.shape->page_size, kv.pages.tokens(row, head));
  double mass = 0;
  for (int q = head * group; q < (head + 1) * group; ++q)
    for (int t = begin; t < end; ++t) mass += kv.mass(row, q, t);
  return mass / group;
}

// What ranks the pages of a head: their attention mass (the mean of the group), or Quest's bound.
enum class RankPages : std::uint8_t { mass, bound };

template <>
struct Choices<RankPages> {
  static constexpr std::pair<RankPages, const char*> all[] = {{RankPages::mass, "mass"}, {RankPages::bound, "bound"}};
};

// The `top` best pages of every KV head, or all if there are fewer, ascending. mass takes Mass::decode; bound takes
// min_max summaries, and `group` makes one bound of a group's. For profilers, like page_mass.
inline PageList best_pages(const LayerStep& step, RankPages by, GroupRule group, int top, Stream s) {
  auto score = step.scratch<float>("page score", {step.rows(), step.kv_heads(), step.max_pages});
  auto budget = step.scratch<std::int32_t>("budget", {step.rows(), step.kv_heads()});
  std::fill_n(budget.data, step.rows() * step.kv_heads(), top);
  const auto best = step.list<PageList>("best pages", step.max_pages);
  if (by == RankPages::bound)
    ops::page_score(step.queries, step.pages, step.summaries, group, 1.f, score, s);
  else
    for (int row = 0; row < step.rows(); ++row)
      for (int head = 0; head < step.kv_heads(); ++head)
        for (int page = 0; page < step.pages.pages(row, head); ++page)
          score(row, head, page) = static_cast<float>(page_mass(step, row, head, page));
  ops::top_pages(step.pages, score, budget, {}, best, s);
  return best;
}

}  // namespace kvlab
