// Logits to tokens, and what logits say about other logits. All in double, over one row of `vocab` logits.
#pragma once
#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace kvlab {

int argmax(std::span<const float> logits);  // ties to the lower id

// Temperature and nucleus (top-p) sampling; temperature 0 = argmax. Deterministic in the generator's state.
struct Sampling {
  double temperature = 0, top_p = 1;
};
int sample(std::span<const float> logits, const Sampling& how, std::mt19937_64& random);

// -log softmax(logits)[token], nats.
double negative_log_likelihood(std::span<const float> logits, int token);

// KL(p || q) of the two softmax distributions, nats; never below 0.
double kl_divergence(std::span<const float> p, std::span<const float> q);

}  // namespace kvlab
