#include "run/sampling.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "base/finite.hpp"

namespace kvlab {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

bool finite(std::span<const float> logits) {
  return count_nonfinite(logits.data(), static_cast<std::int64_t>(logits.size())) == 0;
}

double log_sum_exp(std::span<const float> x) {
  const double top = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (float v : x) sum += std::exp(v - top);
  return top + std::log(sum);
}

struct Scratch {
  std::vector<double> weight;  // [id] exp((logit - largest) / temperature)
  std::vector<int> order;      // ids; the first of them sorted, the most likely first
  std::vector<char> kept;      // [id]
};

// Marks the tokens that top_k and top_p leave.
void keep(std::span<const float> logits, const Sampling& how, Scratch& s) {
  const std::size_t n = logits.size();
  std::size_t most = how.top_k > 0 ? std::min(static_cast<std::size_t>(how.top_k), n) : n;
  std::fill(s.kept.begin(), s.kept.end(), char{1});
  if (most == n && how.top_p >= 1) return;
  std::iota(s.order.begin(), s.order.end(), 0);
  const auto likelier = [&](int a, int b) {
    const float x = logits[static_cast<std::size_t>(a)], y = logits[static_cast<std::size_t>(b)];
    return x != y ? x > y : a < b;
  };
  const auto at = [&](std::size_t i) { return s.order.begin() + static_cast<std::ptrdiff_t>(i); };
  if (most < n) {
    std::nth_element(at(0), at(most), at(n), likelier);
    for (std::size_t i = most; i < n; ++i) s.kept[static_cast<std::size_t>(s.order[i])] = 0;
  }
  if (how.top_p >= 1) return;
  double total = 0, sum = 0;
  for (std::size_t id = 0; id < n; ++id)
    if (s.kept[id]) total += s.weight[id];
  // Tokens below this weight have less than a share of 1 - top_p together, so none of them is needed.
  const double least = (1 - how.top_p) / 2 * total / static_cast<double>(most);
  const auto needed =
      std::partition(at(0), at(most), [&](int id) { return s.weight[static_cast<std::size_t>(id)] >= least; });
  for (auto id = needed; id != at(most); ++id) s.kept[static_cast<std::size_t>(*id)] = 0;
  most = static_cast<std::size_t>(needed - at(0));
  // Few tokens are most of the probability, so a part of them is sorted at a time.
  std::size_t sorted = 0, taken = 0;
  while (taken < most && (taken == 0 || sum < how.top_p * total)) {
    if (taken == sorted) {
      const std::size_t next = std::min(most, std::max<std::size_t>(64, 8 * sorted));
      if (next < most) std::nth_element(at(sorted), at(next), at(most), likelier);
      std::sort(at(sorted), at(next), likelier);
      sorted = next;
    }
    sum += s.weight[static_cast<std::size_t>(s.order[taken++])];
  }
  for (std::size_t i = taken; i < most; ++i) s.kept[static_cast<std::size_t>(s.order[i])] = 0;
}

}  // namespace

int argmax(std::span<const float> logits) {
  if (!finite(logits)) return -1;
  return static_cast<int>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

int sample(std::span<const float> logits, const Sampling& how, double unit) {
  if (how.temperature <= 0 || !finite(logits)) return argmax(logits);
  thread_local Scratch s;
  s.weight.resize(logits.size()), s.order.resize(logits.size()), s.kept.resize(logits.size());
  const double top = *std::max_element(logits.begin(), logits.end());
  for (std::size_t id = 0; id < logits.size(); ++id) s.weight[id] = std::exp((logits[id] - top) / how.temperature);
  keep(logits, how, s);
  double total = 0;
  for (std::size_t id = 0; id < logits.size(); ++id)
    if (s.kept[id]) total += s.weight[id];
  double sum = 0;  // of the same numbers in the same order, so it comes to total, which is more than unit * total
  for (std::size_t id = 0; id < logits.size(); ++id)
    if (s.kept[id] && unit * total < (sum += s.weight[id])) return static_cast<int>(id);
  return argmax(logits);
}

double negative_log_likelihood(std::span<const float> logits, int token) {
  if (!finite(logits)) return nan;
  return log_sum_exp(logits) - logits[static_cast<std::size_t>(token)];
}

double kl_divergence(std::span<const float> p, std::span<const float> q) {
  if (!finite(p) || !finite(q)) return nan;
  const double zp = log_sum_exp(p), zq = log_sum_exp(q);
  double sum = 0;
  for (std::size_t i = 0; i < p.size(); ++i) {
    const double lp = p[i] - zp;
    sum += std::exp(lp) * (lp - (q[i] - zq));
  }
  return std::max(0., sum);
}

double top1_agreement(std::span<const float> p, std::span<const float> q) {
  const int a = argmax(p), b = argmax(q);
  return a < 0 || b < 0 ? nan : a == b;
}

}  // namespace kvlab
