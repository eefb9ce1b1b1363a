// attend's pipelined kernel for caches whose keys it rotates on every read (RopeRegime::cache_relative).
#include "ops/attend/attend_plain.cuh"

namespace kvlab::ops::decode {
namespace {

template <class T>
void launch_dim(const Args& a, int dim, const CUtensorMap& map, cudaStream_t stream) {
  switch (dim) {
    case 64: return launch_plain<T, 64, true>(a, map, stream);
    case 128: return launch_plain<T, 128, true>(a, map, stream);
    default: return launch_plain<T, 256, true>(a, map, stream);
  }
}

}  // namespace

void launch_turned(const Args& a, int dim, bool half, const CUtensorMap& map, cudaStream_t stream) {
  half ? launch_dim<__half>(a, dim, map, stream) : launch_dim<__nv_bfloat16>(a, dim, map, stream);
}

}  // namespace kvlab::ops::decode
