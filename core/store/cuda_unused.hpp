// Counts room for tokens in CudaStore's pages.
#pragma once
#include <kvlab/stream.hpp>

#include <cstdint>

namespace kvlab {
struct CudaStoreLayer;
}

namespace kvlab::cuda_store {

// places[pool] += room for tokens in the partly filled last pages of heads that have a frame of the pool. first: the
// layer at which the heads begin; heads: of all layers and slots. places: [pools] memory of the stream's device.
void count_empty_places(const CudaStoreLayer& first, std::int64_t heads, unsigned long long* places, Stream stream);

}  // namespace kvlab::cuda_store
