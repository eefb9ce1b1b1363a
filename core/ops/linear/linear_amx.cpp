// AMX tiles: 16 rows of 64 bytes. A: 16 rows of 32 bf16; B: 16 pairs of depth, 16 columns; C: 16 x 16 f32.
#include "base/cpu.hpp"
#include "ops/linear/linear_kernels.hpp"

#if defined(__x86_64__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace kvlab::ops::gemm {
namespace {

constexpr int tile = 16, tile_depth = 32;
constexpr std::int64_t tile_bytes = 64;  // a row of a tile

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// A process must ask Linux for the use of tiles.
bool allowed() {
  constexpr long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

// Tiles 0..3 hold C, 4 and 5 A, 6 and 7 B. The template arguments say which of them take part.
template <int row_tiles, int column_tiles>
void block(const PairTile& t, int row, int column) {
  float* y = t.y + row * t.y_stride + column;
  const std::int64_t y_bytes = t.y_stride * std::int64_t{sizeof(float)}, a_bytes = t.a_stride * 2;
  float* const y_low = y + tile * t.y_stride;
  if (t.accumulate) {
    _tile_loadd(0, y, y_bytes);
    if constexpr (column_tiles > 1) _tile_loadd(1, y + tile, y_bytes);
    if constexpr (row_tiles > 1) _tile_loadd(2, y_low, y_bytes);
    if constexpr (row_tiles > 1 && column_tiles > 1) _tile_loadd(3, y_low + tile, y_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const bf16* a = t.a + row * t.a_stride;
  const bf16* b = t.panels + column / tile * t.panel_stride;
  for (int d = 0; d < t.depth; d += tile_depth) {
    _tile_loadd(4, a + d, a_bytes);
    if constexpr (row_tiles > 1) _tile_loadd(5, a + tile * t.a_stride + d, a_bytes);
    _tile_loadd(6, b + d * tile, tile_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (row_tiles > 1) _tile_dpbf16ps(2, 5, 6);
    if constexpr (column_tiles > 1) {
      _tile_loadd(7, b + t.panel_stride + d * tile, tile_bytes);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (row_tiles > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, y, y_bytes);
  if constexpr (column_tiles > 1) _tile_stored(1, y + tile, y_bytes);
  if constexpr (row_tiles > 1) _tile_stored(2, y_low, y_bytes);
  if constexpr (row_tiles > 1 && column_tiles > 1) _tile_stored(3, y_low + tile, y_bytes);
}

template <int row_tiles>
void rows_of(const PairTile& t, int row) {
  int column = 0;
  for (; column + tile < t.columns; column += 2 * tile) block<row_tiles, 2>(t, row, column);
  if (column < t.columns) block<row_tiles, 1>(t, row, column);
}

void product(const PairTile& t) {
  const TileConfig config;
  _tile_loadconfig(&config);
  int row = 0;
  for (; row + tile < t.rows; row += 2 * tile) rows_of<2>(t, row);
  if (row < t.rows) rows_of<1>(t, row);
  _tile_release();  // oneDNN sets its own tile configuration
}

}  // namespace

PairProduct amx_pair_product() {
  static const bool yes = has_amx_bf16() && allowed();
  return yes ? product : nullptr;
}

}  // namespace kvlab::ops::gemm
#else
namespace kvlab::ops::gemm {
PairProduct amx_pair_product() { return nullptr; }
}  // namespace kvlab::ops::gemm
#endif
