// Linear layers of many rows through cuBLASLt. The library is large and only this file needs it, so it is loaded at run
// time.
#include <cublasLt.h>
#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "base/scratch.cuh"
#include "ops/linear/linear.cuh"

namespace kvlab::ops {
namespace {

constexpr std::size_t workspace_bytes = std::size_t{32} << 20;

struct Library {
  LibraryState state;
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtMatmulDescCreate) new_operation;
  decltype(&cublasLtMatmulDescSetAttribute) set_operation;
  decltype(&cublasLtMatrixLayoutCreate) new_layout;
  decltype(&cublasLtMatmulPreferenceCreate) new_preference;
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference;
  decltype(&cublasLtMatmulPreferenceDestroy) delete_preference;
  decltype(&cublasLtMatmulAlgoGetHeuristic) choose;
  decltype(&cublasLtMatmul) multiply;
  std::map<int, cublasLtHandle_t> handles;  // [device]
};

void check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw Error(Errc::device, "got cuBLAS status " + std::to_string(status) + ", wanted success",
                std::string("cuBLASLt ") + what);
}

Library load() {
  Library l = {};
  const std::string major = std::to_string(CUBLAS_VER_MAJOR);
  void* library = open_library("KVLAB_CUBLASLT",
                               {"libcublasLt.so." + major, "/usr/local/cuda/lib64/libcublasLt.so." + major}, l.state);
  if (!library) return l;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (!function && l.state.text.empty()) l.state.text = std::string("got a library without ") + name;
  };
  decltype(&cublasLtGetVersion) version_of;
  find(version_of, "cublasLtGetVersion");
  find(l.create, "cublasLtCreate");
  find(l.new_operation, "cublasLtMatmulDescCreate");
  find(l.set_operation, "cublasLtMatmulDescSetAttribute");
  find(l.new_layout, "cublasLtMatrixLayoutCreate");
  find(l.new_preference, "cublasLtMatmulPreferenceCreate");
  find(l.set_preference, "cublasLtMatmulPreferenceSetAttribute");
  find(l.delete_preference, "cublasLtMatmulPreferenceDestroy");
  find(l.choose, "cublasLtMatmulAlgoGetHeuristic");
  find(l.multiply, "cublasLtMatmul");
  if (!l.state.text.empty()) {
    l.state.text += ", wanted cuBLASLt " + major;
    return l;
  }
  const std::size_t version = version_of();
  l.state.text = "cuBLASLt " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
                 std::to_string(version % 100);
  l.state.there = version / 10000 == CUBLAS_VER_MAJOR;
  if (!l.state.there) l.state.text = "got " + l.state.text + ", wanted " + major;
  return l;
}

// One product as cuBLASLt sees it, by columns: y^T [n, m] = W x^T. Read by columns, W's memory holds W^T.
struct Product {
  cudaDataType type, out_type;
  std::int64_t m, n, k, w_stride, x_stride, y_stride;
  bool add;
  unsigned alignment;  // bytes, of x and y
  int device;
  auto key() const { return std::tie(type, out_type, m, n, k, w_stride, x_stride, y_stride, add, alignment, device); }
  bool operator<(const Product& o) const { return key() < o.key(); }
};

struct Plan {
  cublasLtMatrixLayout_t w, x, y;
  cublasLtMatmulAlgo_t algorithm;
};

std::mutex mutex;

Library& library() {
  static Library l = load();
  return l;
}

cublasLtHandle_t handle_of(Library& l, int device) {
  cublasLtHandle_t& h = l.handles[device];
  if (!h) check(l.create(&h), "create");
  return h;
}

cublasLtMatmulDesc_t operation(Library& l) {
  static const cublasLtMatmulDesc_t all = [&l] {
    cublasLtMatmulDesc_t d;
    check(l.new_operation(&d, CUBLAS_COMPUTE_32F, CUDA_R_32F), "operation");
    const cublasOperation_t transposed = CUBLAS_OP_T;
    check(l.set_operation(d, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed), "operation");
    return d;
  }();
  return all;
}

const Plan& plan_of(Library& l, const Product& p) {
  static std::map<Product, Plan> plans;  // one per shape: a few per model and batch size
  if (const auto found = plans.find(p); found != plans.end()) return found->second;
  Plan plan;
  check(l.new_layout(&plan.w, p.type, static_cast<std::uint64_t>(p.k), static_cast<std::uint64_t>(p.n), p.w_stride),
        "layout");
  check(l.new_layout(&plan.x, p.type, static_cast<std::uint64_t>(p.k), static_cast<std::uint64_t>(p.m), p.x_stride),
        "layout");
  check(l.new_layout(&plan.y, p.out_type, static_cast<std::uint64_t>(p.n), static_cast<std::uint64_t>(p.m), p.y_stride),
        "layout");
  cublasLtMatmulPreference_t wanted;
  check(l.new_preference(&wanted), "preference");
  const std::uint32_t weight_alignment = 16;
  check(l.set_preference(wanted, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes, sizeof workspace_bytes),
        "preference");
  check(l.set_preference(wanted, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &weight_alignment, 4), "preference");
  for (const auto which : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                           CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    check(l.set_preference(wanted, which, &p.alignment, 4), "preference");
  // A split k adds its parts in float. In the type of y, each addition would round at the size of the parts.
  const std::uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  check(l.set_preference(wanted, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction, sizeof reduction),
        "preference");
  cublasLtMatmulHeuristicResult_t best = {};
  int count = 0;
  const cublasStatus_t status =
      l.choose(handle_of(l, p.device), operation(l), plan.w, plan.x, plan.y, plan.y, wanted, 1, &best, &count);
  l.delete_preference(wanted);
  if (status != CUBLAS_STATUS_SUCCESS || count == 0)
    throw Error(Errc::device,
                "got no algorithm (status " + std::to_string(status) + ") for " + std::to_string(p.m) + " x " +
                    std::to_string(p.k) + " times " + std::to_string(p.k) + " x " + std::to_string(p.n),
                "cuBLASLt");
  plan.algorithm = best.algo;
  return plans.emplace(p, plan).first->second;
}

void multiply(const LinearArgs& a, void* y, DType y_dtype, std::int64_t y_stride, bool add, void* stream) {
  const std::lock_guard lock(mutex);
  Library& l = library();
  if (!l.state.there) throw Error(Errc::device, "got no cuBLASLt: " + l.state.text, "op linear (CUDA)");
  Product p;
  p.type = a.dtype == DType::f16 ? CUDA_R_16F : CUDA_R_16BF;
  p.out_type = y_dtype == DType::f32 ? CUDA_R_32F : p.type;
  p.m = a.m, p.n = a.n, p.k = a.k, p.w_stride = a.weight_stride ? a.weight_stride : a.k;
  p.x_stride = a.x_stride, p.y_stride = y_stride;
  p.add = add;
  const std::uintptr_t bits = reinterpret_cast<std::uintptr_t>(a.x) | reinterpret_cast<std::uintptr_t>(y) | 256;
  p.alignment = static_cast<unsigned>(bits & (~bits + 1));
  cuda::check(cudaGetDevice(&p.device), "cudaGetDevice");
  const Plan& plan = plan_of(l, p);
  void* workspace = cuda::kept(stream, "cublaslt", workspace_bytes);
  const float one = 1, old = add ? 1 : 0;
  check(l.multiply(handle_of(l, p.device), operation(l), &one, a.weight, plan.w, a.x, plan.x, &old, y, plan.y, y,
                   plan.y, &plan.algorithm, workspace, workspace_bytes, cuda::stream_of(stream)),
        "matmul");
}

}  // namespace

static const LibraryState& cublaslt_state_cuda() { return library().state; }
KVLAB_ON_CUDA(cublaslt_state, cublaslt_state_cuda);

void linear_blas_cuda(const LinearArgs& a, Stream s) {
  if (a.gated) {
    void* both = cuda::fixed_scratch(s.handle(), "linear gate and up", static_cast<std::size_t>(a.m * a.n * 2));
    multiply(a, both, a.dtype, a.n, false, s.handle());
    silu_mul_cuda(both, a.n, a.dtype, a.m, a.n / 2, a.gated, a.gated_stride, s);
  } else {
    multiply(a, a.y, DType::f32, a.y_stride, a.add, s.handle());
    if (a.bias) add_bias_cuda(a.bias, a.m, a.n, a.y, a.y_stride, s);
  }
}
KVLAB_ON_CUDA(linear_blas, linear_blas_cuda);

}  // namespace kvlab::ops
