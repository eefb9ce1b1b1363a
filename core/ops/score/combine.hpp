// What ops::copy, add, multiply and divide are: one op.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>

#include <cstdint>

namespace kvlab::ops {

enum class Combine : std::uint8_t { copy, add, multiply, divide };

// out = out (rule) in, as kvlab/ops.hpp says; factor of add alone.
void combine(Scores out, View<const float, 3> in, Combine rule, float factor, Stream s);

}  // namespace kvlab::ops
