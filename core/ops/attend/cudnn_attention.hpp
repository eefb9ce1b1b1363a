// Causal attention by cuDNN, an optional library that is looked up at run time: the one that KVLAB_CUDNN names, else
// libcudnn.so.9 wherever the loader finds it; KVLAB_CUDNN=off turns it off. Its graphs are made by NVIDIA's front end,
// headers that the build uses where they are there (core/cmake/cuda.cmake).
#pragma once
#include <kvlab/dtype.hpp>

#include <cstdint>

#include "base/library_state.hpp"

namespace kvlab::ops {

// Each KV head is a sequence with queries and keys of its own; the last query sees its last key.
struct CudnnShape {
  DType dtype = DType::bf16;  // bf16 or f16
  int kv_heads = 0, group = 0, head_dim = 0;
  int queries = 0, keys = 0;  // of each sequence; at most, unless exact
  bool exact = false;         // as many keys as queries, everywhere
  bool stats = false;
  float scale = 0;  // of the scores
  auto operator<=>(const CudnnShape&) const = default;
};

// Device memory, 16-byte aligned. There is room for the most queries and keys of the shape; keys and values after the
// last one are finite.
struct CudnnData {
  const void* queries = nullptr;                                      // [query, kv_head, group, head_dim]
  const void *keys = nullptr, *values = nullptr;                      // [kv_head, key, head_dim]
  const std::int32_t *query_tokens = nullptr, *key_tokens = nullptr;  // [kv_head]; not looked at if exact
  void* out = nullptr;                                                // as queries; rows after the last are anything
  float* stats = nullptr;                                             // [kv_head, group, query]: log-sum-exp, natural
};

class CudnnPlan {
 public:
  virtual ~CudnnPlan() = default;
  virtual std::int64_t workspace_bytes() const = 0;
  // False: cuDNN refused, and nothing is known of the outputs.
  virtual bool run(const CudnnData& data, void* workspace, void* stream) const = 0;
};

// The plan for a shape of the current device, made at the first call (it takes as long as a second) and kept. Null
// where cuDNN is not there or does not take the shape; each call for such a shape warns (base/cuda_warn.hpp).
// Thread-safe.
const CudnnPlan* cudnn_plan(const CudnnShape& shape);

const LibraryState& cudnn_library();

}  // namespace kvlab::ops
