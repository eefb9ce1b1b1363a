#include <omp.h>

#include <algorithm>
#include <cstring>

#include "base/buffer.hpp"
#include "ops/linear/linear_weights.hpp"

namespace kvlab::ops::gemm {
namespace {

// block_rows x block_depth of x stay in a core's L2 while panels pass over them. All threads together pack packed_rows
// rows of x at once.
constexpr std::int64_t block_rows = 96, block_depth = 768, packed_rows = 960;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Start of part b of `blocks` equal parts of [0, count).
std::int64_t part(std::int64_t count, std::int64_t blocks, std::int64_t b) { return count * b / blocks; }

class PanelWeights final : public Weights {
 public:
  PanelWeights(std::int64_t n, std::int64_t k, DType dtype, const Kernels& kernels)
      : n_(n),
        k_(k),
        panels_(ceil_div(n, panel_width)),
        dtype_(dtype),
        kernels_(kernels),
        data_(static_cast<std::size_t>(bytes())) {
    std::memset(data_.as<>(), 0, data_.bytes());
  }

  void put_rows(std::int64_t begin, std::int64_t count, const float* rows) override {
    for (std::int64_t r = 0; r < count; ++r)
      for (std::int64_t i = 0; i < k_; ++i) {
        const float value = rows[r * k_ + i];
        if (dtype_ == DType::bf16)
          data_.as<std::uint16_t>()[place(begin + r, i)] = bf16(value).bits;
        else
          data_.as<float>()[place(begin + r, i)] = value;
      }
  }

  void get_row(std::int64_t n, float* out) const override {
    for (std::int64_t i = 0; i < k_; ++i) {
      if (dtype_ == DType::bf16) {
        bf16 b;
        b.bits = data_.as<std::uint16_t>()[place(n, i)];
        out[i] = float(b);
      } else {
        out[i] = data_.as<float>()[place(n, i)];
      }
    }
  }

  void apply(const float* x, std::int64_t x_stride, float* y, std::int64_t y_stride, std::int64_t m) const override {
    if (m <= row_tile)
      few_rows(x, x_stride, y, y_stride, m);
    else
      for (std::int64_t row = 0; row < m; row += packed_rows)
        many_rows(x + row * x_stride, x_stride, y + row * y_stride, y_stride, std::min(packed_rows, m - row));
  }

  std::int64_t bytes() const override {
    return panels_ * panel_width * k_ * static_cast<std::int64_t>(size_of(dtype_));
  }
  std::string kernel() const override {
    return std::string(kernels_.name) + (dtype_ == DType::bf16 ? " bf16->f32" : " f32");
  }

 private:
  std::int64_t place(std::int64_t n, std::int64_t i) const {
    const int column = static_cast<int>(n % panel_width);
    return (n / panel_width * k_ + i) * panel_width + (dtype_ == DType::bf16 ? bf16_place(column) : column);
  }

  // Multiplies panels [p0, p1) from depth i on.
  void run(Tile t, std::int64_t p0, std::int64_t p1, std::int64_t i) const {
    t.panels = data_.as<>() + (p0 * k_ + i) * panel_width * static_cast<std::int64_t>(size_of(dtype_));
    t.panel_stride = k_ * panel_width;
    t.columns = std::min(n_, p1 * panel_width) - p0 * panel_width;
    t.y += p0 * panel_width;
    (dtype_ == DType::bf16 ? kernels_.bf16 : kernels_.f32)(t);
  }

  // Each thread streams its own run of panels once.
  void few_rows(const float* x, std::int64_t x_stride, float* y, std::int64_t y_stride, std::int64_t m) const {
    const Tile t{x, x_stride, 1, nullptr, 0, k_, y, y_stride, 0, static_cast<int>(m), false};
#pragma omp parallel
    {
      const std::int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
      const std::int64_t p0 = part(panels_, threads, me), p1 = part(panels_, threads, me + 1);
      if (p0 < p1) run(t, p0, p1, 0);
    }
  }

  // Packs x as [depth block][row tile][depth][rows of a tile]. Then each block of x meets runs of panels.
  void many_rows(const float* x, std::int64_t x_stride, float* y, std::int64_t y_stride, std::int64_t m) const {
    const std::int64_t tiles = ceil_div(m, row_tile), tile = ceil_div(m, tiles);
    const std::int64_t depths = ceil_div(k_, block_depth);
    const std::int64_t row_blocks = ceil_div(tiles * tile, block_rows);
    static thread_local Buffer scratch;
    scratch.reserve(static_cast<std::size_t>(tiles * tile * k_) * sizeof(float));
    float* packed = scratch.as<float>();
#pragma omp parallel
    {
#pragma omp for collapse(2) schedule(static)
      for (std::int64_t d = 0; d < depths; ++d)
        for (std::int64_t t = 0; t < tiles; ++t) {
          const std::int64_t i0 = part(k_, depths, d), i1 = part(k_, depths, d + 1);
          const std::int64_t rows = std::min(tile, m - t * tile);
          pack_tile(x + t * tile * x_stride + i0, x_stride, rows, i1 - i0, tile,
                    packed + (i0 * tiles + t * (i1 - i0)) * tile);
        }
      // A run of panels is long enough to pay for reading a block of x and short enough to keep all threads busy.
      const std::int64_t threads = omp_get_num_threads();
      const std::int64_t runs = std::clamp<std::int64_t>(ceil_div(4 * threads, row_blocks), 1, ceil_div(panels_, 2));
#pragma omp for collapse(2) schedule(dynamic)
      for (std::int64_t b = 0; b < row_blocks; ++b)
        for (std::int64_t r = 0; r < runs; ++r) {
          const std::int64_t p0 = part(panels_, runs, r), p1 = part(panels_, runs, r + 1);
          const std::int64_t t0 = part(tiles, row_blocks, b), t1 = part(tiles, row_blocks, b + 1);
          for (std::int64_t d = 0; d < depths; ++d) {
            const std::int64_t i0 = part(k_, depths, d), i1 = part(k_, depths, d + 1);
            for (std::int64_t p = p0; p < p1; ++p)
              for (std::int64_t t = t0; t < t1; ++t) {
                const std::int64_t rows = std::min(tile, m - t * tile);
                const float* a = packed + (i0 * tiles + t * (i1 - i0)) * tile;
                run(Tile{a, 1, tile, nullptr, 0, i1 - i0, y + t * tile * y_stride, y_stride, 0, static_cast<int>(rows),
                         d > 0},
                    p, p + 1, i0);
              }
          }
        }
    }
  }

  static void pack_tile(const float* x, std::int64_t x_stride, std::int64_t rows, std::int64_t depth, std::int64_t tile,
                        float* out) {
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t i = 0; i < depth; ++i) out[i * tile + r] = x[r * x_stride + i];
  }

  std::int64_t n_, k_, panels_;
  DType dtype_;
  const Kernels& kernels_;
  Buffer data_;
};

}  // namespace

std::unique_ptr<Weights> panel_weights(std::int64_t n, std::int64_t k, DType dtype, const Kernels& kernels) {
  return std::make_unique<PanelWeights>(n, k, dtype, kernels);
}

}  // namespace kvlab::ops::gemm
