// Causal attention by cuDNN, an optional library that is loaded at run time. KVLAB_CUDNN names it; else it is
// libcudnn.so.9 from the loader's paths. KVLAB_CUDNN=off turns it off. NVIDIA's front end makes the graphs; the build
// uses its headers if it finds them (core/cmake/cuda.cmake).
#pragma once
#include <kvlab/dtype.hpp>

#include <cstdint>

#include "base/library_state.hpp"

namespace kvlab::ops {

// Each KV head is a sequence with queries and keys of its own; the last query sees its last key.
struct CudnnShape {
  DType dtype = DType::bf16;  // bf16 or f16
  int kv_heads = 0, group = 0, head_dim = 0;
  int queries = 0, keys = 0;  // most of each sequence; exactly as many if `exact`
  bool exact = false;         // every sequence has `queries` queries and as many keys
  bool stats = false;
  float scale = 0;  // factor of the scores
  auto operator<=>(const CudnnShape&) const = default;
};

// Device memory, 16-byte aligned, with room for the shape's queries and keys. Keys and values after the last one must
// be finite.
struct CudnnData {
  const void* queries = nullptr;                                      // [query, kv_head, group, head_dim]
  const void *keys = nullptr, *values = nullptr;                      // [kv_head, key, head_dim]
  const std::int32_t *query_tokens = nullptr, *key_tokens = nullptr;  // [kv_head]; not read if exact
  void* out = nullptr;     // shape of queries; rows after the last hold anything
  float* stats = nullptr;  // [kv_head, group, query]: log-sum-exp, natural
};

class CudnnPlan {
 public:
  virtual ~CudnnPlan() = default;
  virtual std::int64_t workspace_bytes() const = 0;
  // False: cuDNN refused, and the outputs are undefined.
  virtual bool run(const CudnnData& data, void* workspace, void* stream) const = 0;
};

// Returns the plan for a shape on the current device. The first call makes it, which takes up to a second; the process
// keeps it. Null if cuDNN is missing or does not take the shape; each call for such a shape warns (base/cuda_warn.hpp).
// Thread-safe.
const CudnnPlan* cudnn_plan(const CudnnShape& shape);

const LibraryState& cudnn_library();

}  // namespace kvlab::ops
