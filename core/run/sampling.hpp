// Samples tokens from logits and compares rows of logits. All in double, over one row of `vocab` logits.
#pragma once
#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace kvlab {

// The id of the largest logit, the lower one of equals; -1 where a logit is NaN or infinite.
int argmax(std::span<const float> logits);

// Temperature and nucleus (top-p) sampling; temperature 0 = argmax. Deterministic in the generator's state. Returns -1
// where argmax does.
struct Sampling {
  double temperature = 0, top_p = 1;
};
int sample(std::span<const float> logits, const Sampling& how, std::mt19937_64& random);

// These functions return NaN where a logit is NaN or infinite: a wrong number must not look like a good one.

// -log softmax(logits)[token], nats.
double negative_log_likelihood(std::span<const float> logits, int token);

// KL(p || q) of the two softmax distributions, nats; never below 0.
double kl_divergence(std::span<const float> p, std::span<const float> q);

// 1 where both have the same argmax, else 0.
double top1_agreement(std::span<const float> p, std::span<const float> q);

}  // namespace kvlab
