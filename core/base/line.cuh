// Work of a kernel's blocks where every (row, KV head) pair has its own number of units, such as 16 tokens or 16 pages.
// All pairs' units form one line, which the blocks share out.
#pragma once
#include "base/cuda.cuh"

namespace kvlab::cuda {

// Tells a pair's row and KV head. A division would take more than 20 instructions. Exact while pairs x kv_heads is less
// than 2^20.
struct PairOf {
  int kv_heads, share;  // share: 2^20 / kv_heads, rounded up

  PairOf() : PairOf(1) {}
  explicit PairOf(int heads) : kv_heads(heads), share(((1 << 20) + heads - 1) / heads) {}
  __device__ __forceinline__ int row(int pair) const {
    return static_cast<int>(static_cast<unsigned>(pair) * static_cast<unsigned>(share) >> 20);
  }
};

// The line and its parts, one per block. If parts are short and pairs have about the same length, every pair gets the
// same number of whole blocks. Then no block has parts of two pairs. In other cases equal parts cut the line anywhere.
// First(pair) = units before a pair; First(pairs) = all units.
template <class First>
class Line {
 public:
  // longest: units of the longest pair. each: whole blocks that every pair could have; 0 = none.
  __device__ Line(const First& first, int pairs, int longest, int each) : first_(first), pairs_(pairs), each_(0) {
    const int units = first(pairs);
    blocks_ = min(static_cast<int>(gridDim.x), units);
    share_ = blocks_ > 0 ? quotient(units, blocks_) : 0, longer_ = units - share_ * blocks_;
    constexpr int few = 256;
    if (each == 0 || share_ > few) return;
    const int part = quotient(longest + each - 1, each);
    if (part <= share_ + share_ / 16 + 1) each_ = each, share_ = part, blocks_ = each * pairs;
  }
  // Units [begin, end) of a block; none where it does not work.
  struct Part {
    int begin, end;
  };
  __device__ __forceinline__ Part part(int block) const {
    if (block >= blocks_) return {0, 0};
    if (each_ == 0) {
      const int begin = block * share_ + min(block, longer_);
      return {begin, begin + share_ + (block < longer_)};
    }
    const int pair = quotient(block, each_), stop = first_(pair + 1),
              begin = first_(pair) + (block - pair * each_) * share_;
    return {min(begin, stop), min(begin + share_, stop)};
  }
  // The pair of a unit.
  __device__ __forceinline__ int pair_of(int unit) const {
    int low = 0, high = pairs_;
#pragma unroll 1
    while (high - low > 1) {
      const int mid = (low + high) / 2;
      (first_(mid) <= unit ? low : high) = mid;
    }
    return low;
  }
  // Blocks [first_block, last_block] share a pair that has units.
  __device__ __forceinline__ int first_block(int pair) const { return each_ ? pair * each_ : block_of(first_(pair)); }
  __device__ __forceinline__ int last_block(int pair) const {
    const int last = first_(pair + 1) - 1;
    return each_ ? pair * each_ + quotient(last - first_(pair), share_) : block_of(last);
  }

 private:
  // No operand is negative, and an unsigned division takes fewer instructions.
  static __device__ __forceinline__ int quotient(int x, int by) {
    return static_cast<int>(static_cast<unsigned>(x) / static_cast<unsigned>(by));
  }
  __device__ __forceinline__ int block_of(int unit) const {
    const int in_longer = longer_ * (share_ + 1);
    const bool longer = unit < in_longer;
    return (longer ? 0 : longer_) + quotient(unit - (longer ? 0 : in_longer), share_ + longer);
  }
  First first_;
  int pairs_, each_;             // each_: blocks of a pair; 0: the line is cut anywhere
  int blocks_, share_, longer_;  // blocks with units; units of a part; parts with one unit more, if cut anywhere
};

}  // namespace kvlab::cuda
