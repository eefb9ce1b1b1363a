#include "run/sampling.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

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

}  // namespace

int argmax(std::span<const float> logits) {
  if (!finite(logits)) return -1;
  return static_cast<int>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

int sample(std::span<const float> logits, const Sampling& how, std::mt19937_64& random) {
  if (how.temperature <= 0 || !finite(logits)) return argmax(logits);
  std::vector<int> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return logits[static_cast<std::size_t>(a)] > logits[static_cast<std::size_t>(b)];
  });
  const double top = logits[static_cast<std::size_t>(order[0])];
  std::vector<double> weight(order.size());
  for (std::size_t i = 0; i < order.size(); ++i)
    weight[i] = std::exp((logits[static_cast<std::size_t>(order[i])] - top) / how.temperature);
  const double total = std::accumulate(weight.begin(), weight.end(), 0.);
  std::size_t kept = 0;
  double sum = 0;
  while (kept < weight.size() && (kept == 0 || sum < how.top_p * total)) sum += weight[kept++];
  // One draw of 53 bits, so that the result is the same with every standard library.
  double at = static_cast<double>(random() >> 11) * 0x1.0p-53 * sum;
  for (std::size_t i = 0; i < kept; ++i)
    if ((at -= weight[i]) < 0) return order[i];
  return order[kept - 1];
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
