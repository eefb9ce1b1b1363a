// attend's pipelined kernel for caches whose keys it rotates on every read (RopeRegime::cache_relative).
#include "ops/attend/attend_kernel.cuh"

namespace kvlab::ops::decode {
namespace {

template <class T>
void launch_dim(const Args& a, int dim, const CUtensorMap& map, cudaStream_t stream) {
  const bool wide = a.group > 8;
  switch (dim) {
    case 64: return wide ? launch<T, 64, 2, true>(a, map, stream) : launch<T, 64, 1, true>(a, map, stream);
    case 128: return wide ? launch<T, 128, 2, true>(a, map, stream) : launch<T, 128, 1, true>(a, map, stream);
    default: return wide ? launch<T, 256, 2, true>(a, map, stream) : launch<T, 256, 1, true>(a, map, stream);
  }
}

}  // namespace

void launch_turned(const Args& a, int dim, bool half, const CUtensorMap& map, cudaStream_t stream) {
  half ? launch_dim<__half>(a, dim, map, stream) : launch_dim<__nv_bfloat16>(a, dim, map, stream);
}

}  // namespace kvlab::ops::decode
