// Exact selection with a total order: higher score first, equal scores by lower index, NaN below everything.
#pragma once
#include <kvlab/kv.hpp>

#include <cstdint>
#include <cstring>
#include <vector>

namespace kvlab::ops {

// Entries of greater keys are selected first. Keys of different indices differ.
inline std::uint64_t selection_key(float score, std::uint32_t index) {
  std::uint32_t u = 0;
  if (score == score) {
    score += 0.f;  // -0 and 0 are a tie
    std::memcpy(&u, &score, 4);
    u = (u & 0x80000000u) ? ~u : (u | 0x80000000u);
  }
  return (std::uint64_t{u} << 32) | (0xffffffffu - index);
}
inline std::uint32_t selection_index(std::uint64_t key) { return 0xffffffffu - static_cast<std::uint32_t>(key); }

// Puts the `count` greatest keys first, in no order.
void select_greatest(std::uint64_t* keys, std::size_t n, std::size_t count);

// Sets pinned[t] for the first `pins.first` and the last `pins.last` resident tokens of a head in text order. Returns
// their number.
int mark_pins(const PagedKv& kv, int row, int head, const Pins& pins, char* pinned);

// leaves[t] = whether top_tokens leaves out token t of a head of n tokens; null scores rank by position, newer =
// better. Returns their number.
int mark_surplus(const float* score, const std::int32_t* position, int n, int keep, const Pins& pins,
                 std::vector<char>& leaves);

}  // namespace kvlab::ops
