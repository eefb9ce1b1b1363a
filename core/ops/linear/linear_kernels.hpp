// Panel GEMM, one table of kernels per instruction set. W[n, k] is packed as panels of 16 columns of n: [ceil(n /
// 16)][k][16], zero padded. A bf16 panel interleaves columns j and j + 8: the low halves of eight 32-bit words are
// columns 0..7, the high halves columns 8..15. Every y[i, j] is one f32 accumulator summed over k in order, whatever m
// and the number of threads.
#pragma once
#include <kvlab/dtype.hpp>

#include <cstdint>

namespace kvlab::ops::gemm {

inline constexpr int panel_width = 16;
inline constexpr int row_tile = 6;  // most rows of the micro-kernel

// Place of column j of a panel in its packed bf16 row.
constexpr int bf16_place(int j) { return j < 8 ? 2 * j : 2 * (j - 8) + 1; }

// y[rows, panels * 16] (+)= a * panels. Element (row r, depth i) of a is a[r * a_row + i * a_depth]. panels points to
// the first panel at the block's depth 0; the next panel is panel_stride elements further. columns counts the valid
// columns from the first panel on. rows <= row_tile. With accumulate, y holds the sum so far.
struct Tile {
  const float* a;
  std::int64_t a_row, a_depth;
  const void* panels;
  std::int64_t panel_stride;
  std::int64_t depth;
  float* y;
  std::int64_t y_stride;
  std::int64_t columns;
  int rows;
  bool accumulate;
};

struct Kernels {
  const char* name;
  void (*bf16)(const Tile&);
  void (*f32)(const Tile&);
};

const Kernels& portable_kernels();
const Kernels* avx2_kernels();  // null where the CPU lacks them

// y[width] = sum over k of x[k] w[k, column], for `width` columns, a multiple of 16. Weights are bf16 pairs of k: word
// `column` of pair p is weights[pair[p] + column], with the even k in its lower half. x [2 * pairs]. Needs AVX2.
void pair_columns(const std::uint32_t* weights, int width, const std::int64_t* pair, std::int64_t pairs, const float* x,
                  float* y);

// y[rows, columns] (+)= a b, products of bf16 summed in f32. a: [rows, depth]. b: panels of 16 columns, each [depth /
// 2][16][2], with pairs of depth beside each other. depth is a multiple of 32, columns of 16. The kernel may read and
// write rows of a and y up to a multiple of 16.
struct PairTile {
  const bf16* a;
  std::int64_t a_stride;
  const bf16* panels;
  std::int64_t panel_stride;
  int depth;
  float* y;
  std::int64_t y_stride;
  int columns, rows;
  bool accumulate;
};

using PairProduct = void (*)(const PairTile&);
void portable_pair_product(const PairTile& t);
PairProduct amx_pair_product();  // null where the CPU or the operating system has no bf16 tiles

}  // namespace kvlab::ops::gemm
