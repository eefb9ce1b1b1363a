// attend's pipelined kernel for lists of tokens, whose rows it copies one by one.
#include "ops/attend/attend_plain.cuh"

namespace kvlab::ops::decode {
namespace {

template <class T, int Dim>
void launch_group(const Args& a, cudaStream_t stream) {
  const CUtensorMap none = {};
  a.group > 8 ? launch<ListedRows<T, Dim, 2>>(a, none, nullptr, stream)
              : launch<ListedRows<T, Dim, 1>>(a, none, nullptr, stream);
}
template <class T>
void launch_dim(const Args& a, int dim, cudaStream_t stream) {
  switch (dim) {
    case 64: return launch_group<T, 64>(a, stream);
    case 128: return launch_group<T, 128>(a, stream);
    default: return launch_group<T, 256>(a, stream);
  }
}

}  // namespace

void launch_listed(const Args& a, int dim, bool half, cudaStream_t stream) {
  half ? launch_dim<__half>(a, dim, stream) : launch_dim<__nv_bfloat16>(a, dim, stream);
}

}  // namespace kvlab::ops::decode
