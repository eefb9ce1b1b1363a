// Under RopeRegime::re_rotate keys follow their tokens' ranks when others leave. Calls run in the stream's order.
#pragma once
#include "store/cuda_kernels.hpp"

namespace kvlab {

// Returns ranks [row, kv_head, place], with room for all places of a table: the number of the head's tokens at smaller
// text positions. They live until the next call with this stream and tag.
std::int32_t* store_ranks(const CudaStoreLayer& s, const CudaStoreRows& r, const char* tag, void* stream);

// Turns every key in its frame by after - before places, as ops::re_rotate does, on either tier and in that tier's
// codec. A page that changes loses its lower copy and gets a new summary.
void turn_keys(const CudaStoreLayer& s, const CudaStoreRows& r, const std::int32_t* before, const std::int32_t* after,
               void* stream);

}  // namespace kvlab
