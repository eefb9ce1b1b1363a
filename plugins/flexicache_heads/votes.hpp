// The votes of windows on which heads are unstable.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <vector>

namespace flexicache {

inline constexpr double quartile = 0.25;

// The `share` of all indices that `before` puts first, rounded; equals in their own order.
template <class Before>
std::vector<std::size_t> first_of(std::size_t count, double share, Before before) {
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), before);
  order.resize(static_cast<std::size_t>(std::lround(share * static_cast<double>(count))));
  return order;
}

class Votes {
 public:
  explicit Votes(std::size_t heads = 0) : votes_(heads) {}

  // stability: of every head in one window. The bottom quartile gets a vote each.
  void add(const std::vector<double>& stability) {
    for (const std::size_t head :
         first_of(votes_.size(), quartile, [&](std::size_t a, std::size_t b) { return stability[a] < stability[b]; }))
      ++votes_[head];
    ++windows_;
  }

  // 1 for the share of heads with the most votes, 0 for the others.
  std::vector<float> unstable(double share) const {
    std::vector<float> set(votes_.size());
    for (const std::size_t head :
         first_of(votes_.size(), share, [&](std::size_t a, std::size_t b) { return votes_[a] > votes_[b]; }))
      set[head] = 1;
    return set;
  }

  const std::vector<int>& votes() const { return votes_; }
  int windows() const { return windows_; }

 private:
  std::vector<int> votes_;
  int windows_ = 0;
};

}  // namespace flexicache
