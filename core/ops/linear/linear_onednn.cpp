// libkvlab_onednn.so, which ops/linear/onednn.hpp loads.
#include <kvlab/error.hpp>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <oneapi/dnnl/dnnl.hpp>
#include <vector>

#include "base/buffer.hpp"
#include "base/threads.hpp"
#include "ops/linear/linear_weights.hpp"
#include "ops/linear/onednn.hpp"
#include "ops/page/row_kernels.hpp"

namespace kvlab::ops::gemm {
namespace {

using dnnl::memory;

bool effective_isa_has(dnnl::cpu_isa isa) {
  const int want = static_cast<int>(isa);
  return (static_cast<int>(dnnl::get_effective_cpu_isa()) & want) == want;
}

bool has_bf16() { return effective_isa_has(dnnl::cpu_isa::avx512_core_bf16); }

// Rows of one product: a prompt is cut into pieces of this many rows, so that few primitives are made.
constexpr std::int64_t max_rows = 512;
constexpr std::int64_t few_rows = 2;  // most rows for which stream() replaces oneDNN: the memory binds

const dnnl::engine& cpu_engine() {
  static const dnnl::engine e(dnnl::engine::kind::cpu, 0);
  return e;
}

// Offset of index i of one dimension in a blocked layout. The sum over the dimensions is an element's offset.
std::int64_t blocked_offset(const dnnl_memory_desc_t& md, int dim, std::int64_t i) {
  const dnnl_blocking_desc_t& b = md.format_desc.blocking;
  std::int64_t offset = 0, inner = 1;
  for (int n = b.inner_nblks - 1; n >= 0; --n) {
    if (b.inner_idxs[n] == dim) {
      offset += i % b.inner_blks[n] * inner;
      i /= b.inner_blks[n];
    }
    inner *= b.inner_blks[n];
  }
  return offset + i * b.strides[dim];
}

class OneDnnWeights final : public Weights {
 public:
  OneDnnWeights(std::int64_t n, std::int64_t k, DType dtype)
      : n_(n),
        k_(k),
        rounded_(dtype == DType::bf16),
        type_(rounded_ && has_bf16() ? memory::data_type::bf16 : memory::data_type::f32) {
    weights_md_ = memory::desc({k_, n_}, type_, memory::format_tag::any);
    weights_md_ = descriptor(max_rows).weights_desc();
    if (weights_md_.data.format_kind != dnnl_blocked || weights_md_.data.extra.flags != 0)
      throw Error(Errc::unsupported, "got weights in a layout of oneDNN's own, wanted a blocked one");
    for (std::int64_t i = 0; i < n_; ++i) column_.push_back(blocked_offset(weights_md_.data, 1, i));
    for (std::int64_t i = 0; i < k_; ++i) depth_.push_back(blocked_offset(weights_md_.data, 0, i));
    find_pairs();
    data_ = Buffer(weights_md_.get_size());
    std::memset(data_.as<>(), 0, data_.bytes());
  }

  void put_rows(std::int64_t begin, std::int64_t count, const float* rows) override {
    for (std::int64_t r = 0; r < count; ++r)
      for (std::int64_t i = 0; i < k_; ++i) {
        const std::int64_t at = column_[static_cast<std::size_t>(begin + r)] + depth_[static_cast<std::size_t>(i)];
        const float value = rows[r * k_ + i];
        if (type_ == memory::data_type::bf16)
          data_.as<bf16>()[at] = bf16(value);
        else
          data_.as<float>()[at] = rounded_ ? float(bf16(value)) : value;
      }
  }

  void get_row(std::int64_t n, float* out) const override {
    for (std::int64_t i = 0; i < k_; ++i) {
      const std::int64_t at = column_[static_cast<std::size_t>(n)] + depth_[static_cast<std::size_t>(i)];
      out[i] = type_ == memory::data_type::bf16 ? float(data_.as<bf16>()[at]) : data_.as<float>()[at];
    }
  }

  void apply(const float* x, std::int64_t x_stride, float* y, std::int64_t y_stride, std::int64_t m) const override {
    if (m <= few_rows && !pair_.empty()) return stream(x, x_stride, y, y_stride, m);
    for (std::int64_t row = 0; row < m; row += max_rows)
      multiply(x + row * x_stride, x_stride, y + row * y_stride, y_stride, std::min(max_rows, m - row));
  }

  std::int64_t bytes() const override { return static_cast<std::int64_t>(data_.bytes()); }
  std::string kernel() const override { return type_ == memory::data_type::bf16 ? "onednn bf16" : "onednn f32"; }

 private:
  dnnl::matmul::primitive_desc descriptor(std::int64_t m) const {
    const memory::desc x({m, k_}, type_, memory::format_tag::ab);
    const memory::desc y({m, n_}, memory::data_type::f32, memory::format_tag::ab);
    dnnl::primitive_attr attr;
    attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);  // one primitive may run in several threads
    return dnnl::matmul::primitive_desc(dnnl::matmul::desc(x, weights_md_, y), attr, cpu_engine());
  }

  // On every CPU seen, bf16 blocks end in [columns][2 of k]; then decode steps can stream them (pair_columns).
  void find_pairs() {
    const dnnl_blocking_desc_t& b = weights_md_.data.format_desc.blocking;
    const int last = b.inner_nblks - 1;
    if (type_ != memory::data_type::bf16 || last < 1 || b.inner_idxs[last] != 0 || b.inner_blks[last] != 2 ||
        b.inner_idxs[last - 1] != 1 || b.inner_blks[last - 1] % 16 != 0 || b.inner_blks[last - 1] > 256)
      return;
    columns_ = static_cast<int>(b.inner_blks[last - 1]);
    for (std::int64_t i = 0; i < k_; i += 2) pair_.push_back(depth_[static_cast<std::size_t>(i)] / 2);
  }

  void stream(const float* x, std::int64_t x_stride, float* y, std::int64_t y_stride, std::int64_t m) const {
    static thread_local std::vector<float> rounded;  // x rounded to bf16; a zero follows an odd k
    const std::int64_t width = 2 * static_cast<std::int64_t>(pair_.size());
    rounded.assign(static_cast<std::size_t>(m * width), 0.f);
    for (std::int64_t r = 0; r < m; ++r)
      for (std::int64_t i = 0; i < k_; ++i)
        rounded[static_cast<std::size_t>(r * width + i)] = float(bf16(x[r * x_stride + i]));
    const float* from = rounded.data();
    const auto* words = reinterpret_cast<const std::uint32_t*>(data_.as<bf16>());
#pragma omp parallel for schedule(static)
    for (std::int64_t begin = 0; begin < n_; begin += columns_) {
      float out[256];
      const std::int64_t count = std::min<std::int64_t>(columns_, n_ - begin);
      for (std::int64_t r = 0; r < m; ++r) {  // later rows read the block from the cache
        pair_columns(words + column_[static_cast<std::size_t>(begin)] / 2, columns_, pair_.data(),
                     static_cast<std::int64_t>(pair_.size()), from + r * width, out);
        std::copy_n(out, count, y + r * y_stride + begin);
      }
    }
  }

  struct Plan {
    dnnl::matmul::primitive_desc pd;
    dnnl::matmul primitive;
  };

  const Plan& plan(std::int64_t m) const {
    const std::lock_guard lock(mutex_);
    auto it = plans_.find(m);
    if (it == plans_.end()) {
      const AllThreads all;  // a plan may split a sum by threads: the load must not choose how many
      auto pd = descriptor(m);
      it = plans_.emplace(m, Plan{pd, dnnl::matmul(pd)}).first;
    }
    return it->second;
  }

  void multiply(const float* x, std::int64_t x_stride, float* y, std::int64_t y_stride, std::int64_t m) const {
    static thread_local Buffer x_dense, y_dense, scratchpad;
    static thread_local dnnl::stream stream(cpu_engine());
    const Plan& p = plan(m);
    const void* from = x;
    if (type_ == memory::data_type::bf16 || x_stride != k_) {
      x_dense.reserve(static_cast<std::size_t>(m * k_) * sizeof(float));
      copy_rows(x, x_stride, m, x_dense.as<>());
      from = x_dense.as<>();
    }
    float* to = y;
    if (y_stride != n_) {
      y_dense.reserve(static_cast<std::size_t>(m * n_) * sizeof(float));
      to = y_dense.as<float>();
    }
    scratchpad.reserve(p.pd.scratchpad_desc().get_size());
    p.primitive.execute(stream,
                        {{DNNL_ARG_SRC, memory(p.pd.src_desc(), cpu_engine(), const_cast<void*>(from))},
                         {DNNL_ARG_WEIGHTS, memory(weights_md_, cpu_engine(), data_.as<>())},
                         {DNNL_ARG_DST, memory(p.pd.dst_desc(), cpu_engine(), to)},
                         {DNNL_ARG_SCRATCHPAD, memory(p.pd.scratchpad_desc(), cpu_engine(), scratchpad.as<>())}});
    stream.wait();
    if (to != y)
      for (std::int64_t r = 0; r < m; ++r) std::copy_n(to + r * n_, n_, y + r * y_stride);
  }

  void copy_rows(const float* x, std::int64_t x_stride, std::int64_t m, std::byte* out) const {
    const bool narrow = type_ == memory::data_type::bf16;
#pragma omp parallel for schedule(static) if (m > 8)
    for (std::int64_t r = 0; r < m; ++r)
      if (narrow)
        row_kernels().to_bf16(x + r * x_stride, k_, reinterpret_cast<std::uint16_t*>(out) + r * k_);
      else
        std::copy_n(x + r * x_stride, k_, reinterpret_cast<float*>(out) + r * k_);
  }

  std::int64_t n_, k_;
  bool rounded_;
  memory::data_type type_;
  memory::desc weights_md_;
  std::vector<std::int64_t> column_, depth_;
  std::vector<std::int64_t> pair_;  // [k / 2] offset of each pair of k in words, if the layout has pairs
  int columns_ = 0;                 // contiguous columns of a block
  Buffer data_;
  mutable std::mutex mutex_;
  mutable std::map<std::int64_t, Plan> plans_;
};

std::unique_ptr<Weights> weights(std::int64_t n, std::int64_t k, DType dtype) try {
  return std::make_unique<OneDnnWeights>(n, k, dtype);
} catch (const dnnl::error& e) {
  throw Error(Errc::unsupported, std::string("oneDNN refused a matrix multiplication: ") + e.what());
}

void sgemm(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c) {
  dnnl_sgemm('N', 'N', m, n, k, 1.f, a, k, b, n, 0.f, c, n);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void kvlab_onednn(OneDnn* out) {
  out->weights = weights;
  out->sgemm = sgemm;
  out->bf16 = has_bf16();
  out->avx512 = effective_isa_has(dnnl::cpu_isa::avx512_core);
}

}  // namespace kvlab::ops::gemm
