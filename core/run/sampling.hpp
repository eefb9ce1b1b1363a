// Samples tokens from logits and compares rows of logits. All in double, over one row of `vocab` logits.
#pragma once
#include <cstdint>
#include <span>

namespace kvlab {

// The id of the largest logit, the lower one of equals; -1 where a logit is NaN or infinite.
int argmax(std::span<const float> logits);

// Probabilities are softmax(logits / temperature). top_k leaves the k most likely tokens. top_p then leaves the fewest
// most likely ones of these whose share of their probability is at least top_p: nucleus sampling (Holtzman et al. 2020,
// section 3.1). Of equal tokens the lower ids stay. Those that are left keep their proportions.
struct Sampling {
  double temperature = 0;  // 0 = argmax
  double top_p = 1;        // 0 = the most likely token
  int top_k = 0;           // 0 = all
};

// The token at `unit`, 0 <= unit < 1, of the distribution function over ids in ascending order. So equal units give
// equal tokens for logits that differ little. -1 where argmax is. A thread keeps 13 bytes for each of its logits.
int sample(std::span<const float> logits, const Sampling& how, double unit);

// These functions return NaN where a logit is NaN or infinite: a wrong number must not look like a good one.

// -log softmax(logits)[token], nats.
double negative_log_likelihood(std::span<const float> logits, int token);

// KL(p || q) of the two softmax distributions, nats; never below 0.
double kl_divergence(std::span<const float> p, std::span<const float> q);

// 1 where both have the same argmax, else 0.
double top1_agreement(std::span<const float> p, std::span<const float> q);

}  // namespace kvlab
