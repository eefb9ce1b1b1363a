// One number for every head: how many tokens evictions keep, how many pages a list gets. ops.hpp says what holds for
// every op.
#pragma once
#include <cstdint>

#include "kvlab/stream.hpp"
#include "kvlab/view.hpp"

namespace kvlab::ops {

// out(row, head) = value. out: memory of the stream's device. Bytes: out.
void fill_heads(View<std::int32_t, 2> out, std::int32_t value, Stream s);

}  // namespace kvlab::ops
