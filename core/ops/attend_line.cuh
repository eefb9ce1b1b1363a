// The line of units of attend's kernel (attend.cu) and how it is cut into parts.
#pragma once
#include "base/cuda.cuh"

namespace kvlab::ops {

// Every block has a span of the line, the spans differ by a unit at most. A span is the block's own part, then pieces
// of equal size that whoever is free takes. What the parts are follows from the line alone.
struct UnitLine {
  static constexpr int most_pieces = 6;      // of a span
  static constexpr int smallest_piece = 32;  // units; a multiple of the warps of a block, as every piece is
  static constexpr int own_of_five = 4;      // fifths of a span that are the block's own, at least
  static constexpr int most_parts_of_span = most_pieces + 1;

  int total, blocks;  // units; blocks that have any
  int piece, pieces;  // units of a piece; pieces of a span

  __device__ UnitLine(int units, int most_blocks) : total(units), blocks(min(most_blocks, units)) {
    const int span = blocks > 0 ? total / blocks : 0;
    piece = max(smallest_piece, span / 32 / 8 * 8);
    pieces = min(most_pieces, static_cast<int>(std::int64_t{span} * (5 - own_of_five) / 5 / piece));
  }
  __device__ int span(int block) const { return static_cast<int>(std::int64_t{total} * block / blocks); }
  __device__ int parts_of_span() const { return pieces + 1; }
  // First unit of a part, 0 <= part <= all parts.
  __device__ int begin(int part) const {
    const int block = part / parts_of_span(), j = part % parts_of_span();
    return j == 0 ? span(block) : span(block + 1) - (parts_of_span() - j) * piece;
  }
  __device__ int end(int part) const { return begin(part + 1); }
  __device__ int part_of(int unit) const {
    const int block = static_cast<int>(((std::int64_t{unit} + 1) * blocks - 1) / total);
    const int back = (span(block + 1) - 1 - unit) / piece;  // pieces between the unit's and the span's end
    return block * parts_of_span() + (back < pieces ? pieces - back : 0);
  }
  __device__ int all_pieces() const { return blocks * pieces; }
  __device__ int part_of_piece(int n) const { return n / pieces * parts_of_span() + 1 + n % pieces; }
};

// The next piece for a block whose warps ask one after the other: the first one takes it for all. *claim is 0 until
// somebody asks, 1 while he takes, then odd; *taken counts all blocks' takings and is left 0 by the last one.
// Gives a part, or -1: nothing is left. A block that was told so takes no more.
__device__ __forceinline__ int take_piece(const UnitLine& line, int* claim, int* taken) {
  int x;
  while ((x = atomicOr(claim, 1)) == 1) {
  }
  if (x == 0) {
    const int n = atomicAdd(taken, 1);
    if (n == line.all_pieces() + line.blocks - 1) atomicExch(taken, 0);
    x = 2 * n + 3;
    atomicExch(claim, x);
  }
  const int n = (x - 3) / 2;
  return n < line.all_pieces() ? line.part_of_piece(n) : -1;
}

}  // namespace kvlab::ops
