// One op implements ops::copy, add, multiply and divide.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>

#include <cstdint>

namespace kvlab::ops {

enum class Combine : std::uint8_t { copy, add, multiply, divide };

// out = out (rule) in, as kvlab/ops.hpp says. Only add uses factor.
void combine(Scores out, View<const float, 3> in, Combine rule, float factor, Stream s);

}  // namespace kvlab::ops
