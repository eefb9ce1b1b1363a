#include "ops/linear/linear.hpp"

#include <kvlab/error.hpp>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "base/backend.hpp"
#include "base/cpu.hpp"
#include "base/device_op.hpp"
#include "ops/linear/linear_weights.hpp"
#include "ops/linear/onednn.hpp"
#include "ops/page/check.hpp"

namespace kvlab::ops {

using gemm::Kernels;
using gemm::Weights;

namespace {

enum class Choice { automatic, onednn, avx2, portable };

// KVLAB_GEMM names the kernels for tests and comparisons.
Choice choice() {
  const char* value = std::getenv("KVLAB_GEMM");
  const std::string s = value ? value : "";
  if (s.empty()) return Choice::automatic;
  if (s == "onednn") {
    if (!gemm::onednn())
      throw Error(Errc::unsupported, "got KVLAB_GEMM=onednn, wanted libkvlab_onednn.so and oneDNN beside libkvlab.so");
    return Choice::onednn;
  }
  if (s == "portable") return Choice::portable;
  if (s == "avx2") {
    if (!has_avx2()) throw Error(Errc::unsupported, "got KVLAB_GEMM=avx2, wanted kernels that this CPU has");
    return Choice::avx2;
  }
  throw Error(Errc::config, "got KVLAB_GEMM=" + s + ", wanted onednn, avx2 or portable");
}

bool uses_onednn(Choice c, DType dtype) {
  if (c != Choice::automatic) return c == Choice::onednn;
  const gemm::OneDnn* o = gemm::onednn();
  return o && (dtype == DType::bf16 ? o->bf16 : o->avx512);
}

const Kernels& panel_kernels(Choice c) {
  const Kernels* k = c == Choice::portable ? nullptr : gemm::avx2_kernels();
  return k ? *k : gemm::portable_kernels();
}

std::string panel_name(const Kernels& k, DType dtype) {
  return std::string(k.name) + (dtype == DType::bf16 ? " bf16->f32" : " f32");
}

}  // namespace

struct Linear::Impl {
  std::int64_t n = 0, k = 0;
  std::unique_ptr<Weights> weights;
};

Linear::Linear() = default;
Linear::Linear(Linear&&) noexcept = default;
Linear& Linear::operator=(Linear&&) noexcept = default;
Linear::~Linear() = default;

Linear Linear::pack(std::int64_t n, std::int64_t k, DType dtype, const Fill& fill) {
  if (dtype != DType::f32 && dtype != DType::bf16)
    throw Error(Errc::unsupported, std::string("got dtype ") + name_of(dtype) + " on the CPU, wanted f32 or bf16");
  if (n < 1 || k < 1)
    throw Error(Errc::internal, "got a weight matrix of " + std::to_string(n) + " x " + std::to_string(k));
  const Choice c = choice();
  Linear l;
  l.impl_ = std::make_unique<Impl>();
  l.impl_->n = n;
  l.impl_->k = k;
  l.impl_->weights =
      uses_onednn(c, dtype) ? gemm::onednn()->weights(n, k, dtype) : gemm::panel_weights(n, k, dtype, panel_kernels(c));
  const std::int64_t block = std::min<std::int64_t>(n, 4 * gemm::panel_width);
  std::vector<float> rows(static_cast<std::size_t>(block * k));
  for (std::int64_t begin = 0; begin < n; begin += block) {
    const std::int64_t count = std::min(block, n - begin);
    fill(begin, count, rows.data());
    l.impl_->weights->put_rows(begin, count, rows.data());
  }
  return l;
}

void Linear::apply(const float* x, std::int64_t x_stride, float* y, std::int64_t y_stride, std::int64_t m) const {
  if (m > 0) impl_->weights->apply(x, x_stride, y, y_stride, m);
}

void Linear::row(std::int64_t n, float* out) const {
  if (n < 0 || n >= impl_->n)
    throw Error(Errc::internal, "got row " + std::to_string(n) + " of " + std::to_string(impl_->n));
  impl_->weights->get_row(n, out);
}

std::int64_t Linear::n() const { return impl_ ? impl_->n : 0; }
std::int64_t Linear::k() const { return impl_ ? impl_->k : 0; }
std::int64_t Linear::bytes() const { return impl_ ? impl_->weights->bytes() : 0; }
std::string Linear::kernel() const { return impl_ ? impl_->weights->kernel() : ""; }

std::string bf16_kernel() {
  const Choice c = choice();
  if (!uses_onednn(c, DType::bf16)) return panel_name(panel_kernels(c), DType::bf16);
  return gemm::onednn()->bf16 ? "onednn bf16" : "onednn f32";
}

void linear(const LinearArgs& a, Stream s) {
  require_cuda_stream(s, "linear");
  only_on_cuda<linear>(a, s);
}

void linear_stream(const LinearArgs& a, Stream s) {
  require_cuda_stream(s, "linear_stream");
  only_on_cuda<linear_stream>(a, s);
}

void linear_blas(const LinearArgs& a, Stream s) {
  require_cuda_stream(s, "linear_blas");
  only_on_cuda<linear_blas>(a, s);
}

const LibraryState& cublaslt_state() { return only_on_cuda<cublaslt_state>(); }

void require_cuda_for_models(const char* who) {
  require_cuda(who);
  if (const LibraryState& blas = cublaslt_state(); !blas.there)
    throw Error(Errc::device, "got backend cuda without cuBLASLt, wanted it for models' products: " + blas.text, who);
}

}  // namespace kvlab::ops
