// Checks the numbers that a plugin's callback wrote, in the memory where they lie. On a GPU the ops only note a
// finding, and the host reads it later.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/roles.hpp>

#include <cstdint>

namespace kvlab::ops {

// Counts wrong numbers and names the first. All zero = none was found.
struct Finding {
  std::uint64_t count = 0;  // wrong numbers
  std::uint64_t first = 0;  // complement of layer, KV head and number: an atomic maximum finds the lowest; 0 = none
  std::uint64_t over = 0;   // find_keep: tokens << 32 | total of a row over its total, the row with the most tokens

  static constexpr std::uint64_t key(int layer, int kv_head, std::int32_t number) {
    return ~(static_cast<std::uint64_t>(layer) << 48 | static_cast<std::uint64_t>(kv_head) << 32 |
             static_cast<std::uint32_t>(number));
  }
  int layer() const { return static_cast<int>(~first >> 48); }
  int kv_head() const { return static_cast<int>(~first >> 32 & 0xffff); }
  std::int32_t number() const { return static_cast<std::int32_t>(static_cast<std::uint32_t>(~first)); }
  std::uint32_t kept() const { return static_cast<std::uint32_t>(over >> 32); }
  std::uint32_t total() const { return static_cast<std::uint32_t>(over); }
};

// Adds the NaN among the scores of cached tokens; Finding::number is the first one's text position. finding is memory
// of the stream's device. Bytes: the scores.
void find_nan(const PagedKv& kv, int layer, const Scores& scores, Finding* finding, Stream s);

// Adds the entries of a.keep below 0 or above the head's length; Finding::number is the first such entry. kept [row]
// sums a.keep over the layers, from layer 0 on; it is memory of the stream's device. After the last layer a row is over
// its total when it keeps on average more than total + 1 + pins per layer and head. A head may round its share up to a
// whole token, and pins may lie above the share.
void find_keep(const Allotment& a, std::int64_t* kept, Finding* finding, Stream s);

}  // namespace kvlab::ops
