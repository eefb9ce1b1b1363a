// Keys that follow their tokens' ranks (RopeRegime::re_rotate) when others leave. Runs in the stream's order.
#pragma once
#include "store/cuda_kernels.hpp"

namespace kvlab {

// [row, kv_head, place], room for all places of a table: how many of the head's tokens have a smaller text position.
// Good until the next call for the stream with this tag.
std::int32_t* store_ranks(const CudaStoreLayer& s, const CudaStoreRows& r, const char* tag, void* stream);

// Turns every key in its frame, on either tier and in that tier's codec, by after - before places, as ops::re_rotate
// does. Of pages that change the lower copy goes and the summary is made anew.
void turn_keys(const CudaStoreLayer& s, const CudaStoreRows& r, const std::int32_t* before, const std::int32_t* after,
               void* stream);

}  // namespace kvlab
