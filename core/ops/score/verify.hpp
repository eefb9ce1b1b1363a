// Looks at the numbers that a plugin's callback left, where they lie. On a GPU the ops only note: the host reads the
// finding later.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/roles.hpp>

#include <cstdint>

namespace kvlab::ops {

// What was found; all zero = nothing was.
struct Finding {
  std::uint64_t count = 0;  // wrong numbers
  std::uint64_t first = 0;  // complement of layer, KV head and a number, so that the lowest is the largest; 0 = none
  std::uint64_t over = 0;   // by find_keep: a row's tokens << 32 | its total, of the row that keeps the most too many

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

// Adds the NaN among the scores of cached tokens; the number of the first is its text position. finding: memory of the
// stream's device. Bytes: the scores.
void find_nan(const PagedKv& kv, int layer, const Scores& scores, Finding* finding, Stream s);

// Adds what is below 0 or above the head's length in a.keep; the number of the first is what keep has. kept [row]: sums
// over the layers, which layer 0 begins; memory of the stream's device. After the last layer a row is over its total
// when it keeps more than total + 1 + pins in each layer and KV head: a head may be short of nothing but a whole token,
// and pins may lie above its share.
void find_keep(const Allotment& a, std::int64_t* kept, Finding* finding, Stream s);

}  // namespace kvlab::ops
