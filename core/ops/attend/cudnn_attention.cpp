#include "ops/attend/cudnn_attention.hpp"

#ifdef KVLAB_CUDNN_FRONTEND
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cuda_runtime_api.h>
#include <cudnn_frontend.h>
#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "base/cuda_warn.hpp"

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;  // the front end looks up cuDNN's functions in it
}

namespace kvlab::ops {
namespace {

namespace fe = cudnn_frontend;

constexpr std::size_t oldest = 90600;  // first version with bottom-right causal masks for sequences of any length

struct Library {
  LibraryState state;

  Library() {
    fe::cudnn_dlhandle = open_library("KVLAB_CUDNN", {"libcudnn.so.9"}, state);
    if (!fe::cudnn_dlhandle) return;
    if (!dlsym(fe::cudnn_dlhandle, "cudnnGetVersion")) {
      const char* chosen = std::getenv("KVLAB_CUDNN");
      state.text = std::string("got ") + (chosen && *chosen ? chosen : "libcudnn.so.9") + ", which is not cuDNN";
      return;
    }
    const std::size_t version = fe::detail::get_backend_version();
    state.text = "cuDNN " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
                 std::to_string(version % 100);
    if (version < oldest) {
      state.text = "got " + state.text + ", wanted 9.6 or newer";
      return;
    }
    open_runtime();
    state.there = true;
  }

  // The front end looks for a shared CUDA runtime by name, but kvlab links its runtime statically. Once dlopen has
  // loaded the shared one from any path, its name finds it.
  static void open_runtime() {
    const std::string name = "libcudart.so." + std::to_string(CUDART_VERSION / 1000);
    if (!dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL))
      dlopen(("/usr/local/cuda/lib64/" + name).c_str(), RTLD_NOW | RTLD_LOCAL);
  }
};

const Library& library() {
  static const Library once;
  return once;
}

void check(fe::error_t status, const char* what) {
  if (status.is_bad()) throw std::runtime_error(std::string(what) + ": " + status.get_message());
}

void check(cudnnStatus_t status, const char* what) {
  if (status != CUDNN_STATUS_SUCCESS)
    throw std::runtime_error(std::string(what) + ": " + fe::detail::get_error_string(status));
}

void warn(const std::string& why) {
  cuda::warn(library().state.text + " does not do a prompt's attention, our own kernel does: " + why);
}

std::mutex& guard() {
  static std::mutex m;
  return m;
}

int current_device() {
  int device = 0;
  if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess)
    throw std::runtime_error(std::string("cudaGetDevice: ") + cudaGetErrorString(status));
  return device;
}

cudnnHandle_t handle_of(int device) {
  // never destroyed: the driver ends before static destructors
  static auto& handles = *new std::map<int, cudnnHandle_t>;
  cudnnHandle_t& h = handles[device];
  if (!h) check(fe::detail::create_handle(&h), "cudnnCreate");
  return h;
}

enum Id : std::int64_t { queries_id = 1, keys_id, values_id, out_id, stats_id, query_tokens_id, key_tokens_id };

class Plan final : public CudnnPlan {
 public:
  Plan(const CudnnShape& s, int device) : shape_(s), handle_(handle_of(device)) {
    using fe::graph::Tensor_attributes;
    const std::int64_t heads = s.kv_heads, group = s.group, dim = s.head_dim, width = heads * group * dim;
    const auto tensor = [&](Id id, const std::vector<std::int64_t>& size, const std::vector<std::int64_t>& stride) {
      return Tensor_attributes().set_uid(id).set_dim(size).set_stride(stride);
    };
    const std::vector<std::int64_t> query_size{heads, group, s.queries, dim}, query_stride{group * dim, dim, width, 1},
        key_size{heads, 1, s.keys, dim}, key_stride{s.keys * dim, s.keys * dim, dim, 1};
    graph_.set_io_data_type(s.dtype == DType::f16 ? fe::DataType_t::HALF : fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    auto options =
        fe::graph::SDPA_attributes()
            .set_name("prompt")
            .set_implementation(fe::AttentionImplementation_t::COMPOSITE)
            .set_generate_stats(s.stats)
            .set_attn_scale(s.scale)
            .set_diagonal_alignment(s.exact ? fe::DiagonalAlignment_t::TOP_LEFT : fe::DiagonalAlignment_t::BOTTOM_RIGHT)
            .set_diagonal_band_right_bound(0);
    if (!s.exact) {
      const auto lengths = [&](Id id) {
        return graph_.tensor(tensor(id, {heads, 1, 1, 1}, {1, 1, 1, 1}).set_data_type(fe::DataType_t::INT32));
      };
      options.set_padding_mask(true).set_seq_len_q(lengths(query_tokens_id)).set_seq_len_kv(lengths(key_tokens_id));
    }
    const auto [out, stats] = graph_.sdpa(graph_.tensor(tensor(queries_id, query_size, query_stride)),
                                          graph_.tensor(tensor(keys_id, key_size, key_stride)),
                                          graph_.tensor(tensor(values_id, key_size, key_stride)), options);
    out->set_output(true).set_uid(out_id).set_dim(query_size).set_stride(query_stride);
    if (s.stats)
      stats->set_output(true)
          .set_uid(stats_id)
          .set_data_type(fe::DataType_t::FLOAT)
          .set_dim({heads, group, s.queries, 1})
          .set_stride({group * s.queries, s.queries, 1, 1});
    check(graph_.build(handle_, {fe::HeurMode_t::A}), "a graph");
    check(graph_.get_workspace_size(workspace_), "a graph's workspace");
  }

  std::int64_t workspace_bytes() const override { return workspace_; }

  bool run(const CudnnData& d, void* workspace, void* stream) const override try {
    const std::lock_guard lock(guard());  // it also guards the handle's stream
    check(fe::detail::set_stream(handle_, static_cast<cudaStream_t>(stream)), "cudnnSetStream");
    const auto pointer = [](const void* p) { return const_cast<void*>(p); };
    std::unordered_map<std::int64_t, void*> tensors{
        {queries_id, pointer(d.queries)}, {keys_id, pointer(d.keys)}, {values_id, pointer(d.values)}, {out_id, d.out}};
    if (shape_.stats) tensors[stats_id] = d.stats;
    if (!shape_.exact)
      tensors[query_tokens_id] = pointer(d.query_tokens), tensors[key_tokens_id] = pointer(d.key_tokens);
    check(graph_.execute(handle_, tensors, workspace), "a run");
    return true;
  } catch (const std::exception& e) {
    warn(e.what());
    return false;
  }

 private:
  CudnnShape shape_;
  cudnnHandle_t handle_;
  fe::graph::Graph graph_;
  std::int64_t workspace_ = 0;
};

}  // namespace

const CudnnPlan* cudnn_plan(const CudnnShape& shape) {
  if (!library().state.there) return nullptr;
  struct Known {
    std::unique_ptr<Plan> plan;
    std::string refused;  // why there is no plan
  };
  using Plans = std::map<std::pair<int, CudnnShape>, Known>;
  static Plans& plans = *new Plans;  // never destroyed, like handles
  const std::lock_guard lock(guard());
  try {
    const int device = current_device();
    const auto [entry, fresh] = plans.try_emplace({device, shape});
    Known& known = entry->second;
    if (fresh) try {
        known.plan = std::make_unique<Plan>(shape, device);
      } catch (const std::exception& e) {
        known.refused = e.what();
      }
    if (!known.plan) warn(known.refused);
    return known.plan.get();
  } catch (const std::exception& e) {
    warn(e.what());
    return nullptr;
  }
}

const LibraryState& cudnn_library() { return library().state; }

}  // namespace kvlab::ops

#else

namespace kvlab::ops {

const CudnnPlan* cudnn_plan(const CudnnShape&) { return nullptr; }

const LibraryState& cudnn_library() {
  static const LibraryState state = [] {
    LibraryState s;
    open_library("KVLAB_CUDNN", {}, s);  // reads whether KVLAB_CUDNN is off
    if (!s.off) s.text = "not used: kvlab was built without cuDNN's front end";
    return s;
  }();
  return state;
}

}  // namespace kvlab::ops

#endif
