// Numbers of 16 bits and f32 in the types that ops store.
#pragma once
#include <kvlab/dtype.hpp>

#include <cstdint>
#include <vector>

#include "base/half.hpp"
#include "cases/place.hpp"

namespace kvlab::cases {

inline std::uint16_t to_16(float x, DType t) { return t == DType::f16 ? float_to_half(x) : bf16(x).bits; }
inline float from_16(std::uint16_t x, DType t) {
  bf16 b;
  b.bits = x;
  return t == DType::f16 ? half_to_float(x) : static_cast<float>(b);
}
// x as a number of this type holds it.
inline float stored(float x, DType t) { return t == DType::f32 ? x : from_16(to_16(x, t), t); }

// Copies numbers to the place in this type.
inline void* put_as(Place& place, const std::vector<float>& from, DType t) {
  if (t == DType::f32) return place.put(from);
  std::vector<std::uint16_t> rounded;
  rounded.reserve(from.size());
  for (const float x : from) rounded.push_back(to_16(x, t));
  return place.put(rounded);
}
inline std::vector<float> get_as(const Place& place, const void* from, DType t, std::int64_t count) {
  if (t == DType::f32) return place.get(View<const float, 1>::dense(static_cast<const float*>(from), {count}));
  std::vector<float> wide;
  wide.reserve(static_cast<std::size_t>(count));
  for (const auto x : place.get(View<const std::uint16_t, 1>::dense(static_cast<const std::uint16_t*>(from), {count})))
    wide.push_back(from_16(x, t));
  return wide;
}

}  // namespace kvlab::cases
