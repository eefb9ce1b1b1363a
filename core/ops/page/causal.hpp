// Causal lengths of the tokens of a prompt's chunk, when the cache already holds the whole chunk.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>

#include <cstdint>

namespace kvlab::ops {

// length[t, head] = now[head] - tokens + t + 1 and row[t] = t: token t of the chunk sees no later token. Bytes:
// outputs.
void causal(const std::int32_t* now, int kv_heads, int tokens, std::int32_t* length, std::int32_t* row, Stream s);

// The list of one slot for each row of `rows`: a token of the chunk reads those of its pages that begin before it ends.
// counts: [row + 1, kv_head] memory of the stream's device. The list that it returns borrows the slot's indices. Bytes:
// the list, and counts.
PageList causal_pages(PageList list, std::int64_t slot, const PagedKv& rows, std::int32_t* counts, Stream s);
void count_causal_pages(const PageList& list, const PagedKv& rows, Stream s);  // its work; row `rows` has the counts

}  // namespace kvlab::ops
