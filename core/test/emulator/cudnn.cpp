// Plain loops compute attention in place of cuDNN (ops/attend/cudnn_attention.cpp, which is not compiled). They do not
// read rows and keys past a sequence's last, and write NaN to such rows of the output.
#include "ops/attend/cudnn_attention.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <vector>

#include "base/cuda.cuh"

namespace kvlab::ops {
namespace {

template <class T>
void attend(const CudnnShape& s, const CudnnData& d) {
  const auto *queries = static_cast<const T*>(d.queries), *keys = static_cast<const T*>(d.keys),
             *values = static_cast<const T*>(d.values);
  auto* out = static_cast<T*>(d.out);
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> weight(static_cast<std::size_t>(s.keys)), sum(static_cast<std::size_t>(s.head_dim));
  for (int head = 0; head < s.kv_heads * s.group; ++head) {
    const int kv_head = head / s.group, rows = s.exact ? s.queries : d.query_tokens[kv_head],
              seen = s.exact ? s.keys : d.key_tokens[kv_head];
    if (rows < 1 || rows > s.queries || seen < rows || seen > s.keys) emulator::fail("cudnn: lengths");
    const std::int64_t side = std::int64_t{kv_head} * s.keys * s.head_dim;
    for (int row = 0; row < s.queries; ++row) {
      const std::int64_t at = (std::int64_t{row} * s.kv_heads * s.group + head) * s.head_dim;
      float* stats = s.stats ? d.stats + std::int64_t{head} * s.queries + row : nullptr;
      if (row >= rows) {
        for (int i = 0; i < s.head_dim; ++i) out[at + i] = T(nan);
        if (stats) *stats = nan;
        continue;
      }
      const int end = seen - rows + row + 1;
      float most = -INFINITY, total = 0;
      for (int t = 0; t < end; ++t) {
        float dot = 0;
        for (int i = 0; i < s.head_dim; ++i)
          dot += static_cast<float>(queries[at + i]) * static_cast<float>(keys[side + t * s.head_dim + i]);
        weight[static_cast<std::size_t>(t)] = dot * s.scale;
        most = std::fmax(most, dot * s.scale);
      }
      std::fill(sum.begin(), sum.end(), 0.f);
      for (int t = 0; t < end; ++t) {
        const float w = std::exp(weight[static_cast<std::size_t>(t)] - most);
        total += w;
        for (int i = 0; i < s.head_dim; ++i)
          sum[static_cast<std::size_t>(i)] += w * static_cast<float>(values[side + t * s.head_dim + i]);
      }
      for (int i = 0; i < s.head_dim; ++i) out[at + i] = T(sum[static_cast<std::size_t>(i)] / total);
      if (stats) *stats = most + std::log(total);
    }
  }
}

class Plan final : public CudnnPlan {
 public:
  explicit Plan(const CudnnShape& s) : shape_(s) {}
  std::int64_t workspace_bytes() const override { return 0; }
  bool run(const CudnnData& data, void*, void* stream) const override {
    emulator::submit(cuda::stream_of(stream), [s = shape_, data] {
      s.dtype == DType::f16 ? attend<__half>(s, data) : attend<__nv_bfloat16>(s, data);
    });
    return true;
  }

 private:
  CudnnShape shape_;
};

}  // namespace

const CudnnPlan* cudnn_plan(const CudnnShape& shape) {
  if (!cudnn_library().there) return nullptr;
  static std::map<CudnnShape, std::unique_ptr<Plan>> plans;
  auto& plan = plans[shape];
  if (!plan) plan = std::make_unique<Plan>(shape);
  return plan.get();
}

const LibraryState& cudnn_library() {
  static const LibraryState state = emulator::stand_in("cuDNN", "KVLAB_CUDNN");
  return state;
}

}  // namespace kvlab::ops
