// Causal lengths of the tokens of a prompt's chunk, when the cache already holds the whole chunk.
#pragma once
#include <kvlab/stream.hpp>

#include <cstdint>

namespace kvlab::ops {

// length[t, head] = now[head] - tokens + t + 1 and row[t] = t: token t of the chunk sees no later token. Bytes:
// outputs.
void causal(const std::int32_t* now, int kv_heads, int tokens, std::int32_t* length, std::int32_t* row, Stream s);

}  // namespace kvlab::ops
