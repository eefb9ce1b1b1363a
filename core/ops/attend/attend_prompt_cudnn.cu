// A prompt's attention by cuDNN. It wants 16-bit queries and dense rows of keys and values. So queries are rounded,
// unless the caller has done it, and pages are gathered, which costs a hundredth of the work. Lengths stay in device
// memory; plans are made for rounded lengths.
#include <algorithm>
#include <atomic>
#include <new>

#include "base/cuda_warn.hpp"
#include "base/scratch.cuh"
#include "ops/attend/attend_prompt.cuh"
#include "ops/attend/attend_unit.cuh"
#include "ops/attend/cudnn_attention.hpp"
#include "ops/linear/linear.cuh"

namespace kvlab::ops {
using namespace cuda;
namespace {

constexpr int threads = 256;

template <class T>
__global__ void __launch_bounds__(threads) widen_kernel(const T* from, int heads, int dim, View<float, 3> out) {
  const std::int64_t i = 4 * (std::int64_t{blockIdx.x} * threads + threadIdx.x);
  const std::int64_t row = i / (heads * dim);
  if (row >= out.extent[0]) return;
  const int head = static_cast<int>(i % (heads * dim)) / dim, at = static_cast<int>(i % dim);
  const uint2 x = *reinterpret_cast<const uint2*>(from + i);
  float4 y;
  Pair<T>::unpack(x.x, y.x, y.y);
  Pair<T>::unpack(x.y, y.z, y.w);
  *reinterpret_cast<float4*>(out.data + row * out.stride[0] + head * out.stride[1] + at) = y;
}

unsigned blocks_of(std::int64_t work) { return static_cast<unsigned>((work + threads - 1) / threads); }

void widen(const void* from, DType dtype, int dim, const View<float, 3>& out, void* stream) {
  const int heads = static_cast<int>(out.extent[1]);
  const auto go = [&]<class T>(const T* x) {
    const auto kernel = widen_kernel<T>;
    kernel<<<blocks_of(out.extent[0] * heads * dim / 4), threads, 0, stream_of(stream)>>>(x, heads, dim, out);
  };
  dtype == DType::f16 ? go(static_cast<const __half*>(from)) : go(static_cast<const __nv_bfloat16*>(from));
  check_launch("attend_prompt widen");
}

std::atomic<std::int64_t> chunks = 0;

// Does not warn if the user has turned cuDNN off.
void warn_missing() {
  const LibraryState& cudnn = cudnn_library();
  if (cudnn.there || cudnn.off) return;
  cuda::warn("long prompts take 1.2 to 1.7 times as long without cuDNN (" + cudnn.text + ")");
}

bool run(const PromptArgs& in, float scale, PromptLse* lse, PromptRows& rows, Stream to) {
  void* stream = to.handle();
  const PagedKv& kv = in.kv;
  const int heads = static_cast<int>(in.queries.extent[1]), dim = kv.head_dim;
  CudnnShape s;
  s.dtype = kv.layouts[0].dtype;
  s.kv_heads = kv.kv_heads, s.group = heads / kv.kv_heads, s.head_dim = dim;
  s.queries = prompt_room(kv.rows), s.keys = prompt_room(in.longest);
  s.exact = in.longest == kv.rows && s.queries == kv.rows;
  s.stats = lse != nullptr;
  s.scale = scale;
  const CudnnPlan* plan = cudnn_plan(s);
  if (!plan) {
    warn_missing();
    return false;
  }

  const auto scratch = [&](const char* tag, std::int64_t bytes) {
    return fixed_scratch(stream, tag, static_cast<std::size_t>(std::max<std::int64_t>(bytes, 256)));
  };
  const std::int64_t query_bytes = std::int64_t{s.queries} * heads * dim * 2,
                     key_bytes = std::int64_t{kv.kv_heads} * s.keys * dim * 2;
  void *keys = scratch("cudnn keys", key_bytes), *values = scratch("cudnn values", key_bytes);
  auto* lengths = static_cast<std::int32_t*>(scratch("cudnn lengths", 8 * kv.kv_heads));
  CudnnData d;
  d.queries = rounded_queries(in, s.queries, to), d.keys = keys, d.values = values;
  d.query_tokens = lengths, d.key_tokens = lengths + kv.kv_heads;
  d.out = in.rounded ? in.rounded : scratch("cudnn out", query_bytes);
  if (lse) d.stats = static_cast<float*>(scratch("cudnn stats", std::int64_t{heads} * s.queries * 4));
  void* workspace = scratch("cudnn workspace", plan->workspace_bytes());

  gather_prompt(kv, s.keys, keys, values, lengths, to);
  rows = {d.queries, keys, s.keys};
  if (!plan->run(d, workspace, stream)) return false;
  ++chunks;
  if (!in.rounded) widen(d.out, s.dtype, dim, in.out, stream);
  if (lse) *lse = {d.stats, 1, s.queries};
  return true;
}

}  // namespace

static std::int64_t cudnn_chunks_cuda() { return chunks; }
KVLAB_ON_CUDA(cudnn_chunks, cudnn_chunks_cuda);
KVLAB_ON_CUDA(cudnn_state, cudnn_library);

bool attend_prompt_cudnn(const PromptArgs& in, float scale, PromptLse* lse, PromptRows& rows, Stream s) try {
  if (in.longest < in.kv.rows || (in.kernel == PromptKernel::best && in.kv.rows < prompt_cudnn_rows) ||
      in.queries.stride[1] != in.kv.head_dim)
    return false;
  return run(in, scale, lse, rows, s);
} catch (const std::bad_alloc&) {  // no memory for the copies; our own kernel needs none
  return false;
}

}  // namespace kvlab::ops
