// Weights of synthetic models, the same numbers on every backend.
#pragma once
#include <kvlab/dtype.hpp>
#include <kvlab/stream.hpp>

#include <cstdint>

namespace kvlab {

// Number i of a tensor's stream: uniform, mean 0 and variance 1, an odd multiple of 2^-24 times sqrt(3).
constexpr float random_weight(std::uint64_t seed, std::uint64_t i) {
  std::uint64_t x = (seed ^ i * 0x9e3779b97f4a7c15u) + 0x9e3779b97f4a7c15u;  // SplitMix64 (Steele et al. 2014)
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  x ^= x >> 31;
  const auto odd = static_cast<std::int32_t>(x >> 40) * 2 + 1 - (1 << 24);
  return static_cast<float>(odd) * (1.7320508f / (1 << 24));
}

// out[i] of bf16 or f16, i < count: random_weight(seed, first + i) * scale. CUDA alone: Errc::unsupported for other
// types and for a CPU stream.
void random_weights(void* out, DType dtype, std::int64_t first, std::int64_t count, std::uint64_t seed, float scale,
                    Stream s);

}  // namespace kvlab
