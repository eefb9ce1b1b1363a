// Numbers of a plugin's callback, looked at where they are. On a GPU nothing waits: the host reads the finding later.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/roles.hpp>

#include <cstdint>

namespace kvlab::ops {

// What was found; all zero = nothing was.
struct Finding {
  std::uint64_t count = 0;  // wrong numbers
  std::uint64_t first = 0;  // complement of layer, KV head and a number, so that the lowest is the largest; 0 = none
  std::int64_t kept = 0;    // by find_keep, of the layers since layer 0

  static constexpr std::uint64_t key(int layer, int kv_head, std::int32_t number) {
    return ~(static_cast<std::uint64_t>(layer) << 48 | static_cast<std::uint64_t>(kv_head) << 32 |
             static_cast<std::uint32_t>(number));
  }
  int layer() const { return static_cast<int>(~first >> 48); }
  int kv_head() const { return static_cast<int>(~first >> 32 & 0xffff); }
  std::int32_t number() const { return static_cast<std::int32_t>(static_cast<std::uint32_t>(~first)); }
};

// Adds the NaN among the scores of cached tokens; the number of the first is its text position. finding: memory of the
// stream's device. Bytes: the scores.
void find_nan(const PagedKv& kv, int layer, const Scores& scores, Finding* finding, Stream s);

// Adds what is below 0 or above the head's length in a.keep; the number of the first is what keep has. Layer 0 begins a
// new sum of what is kept.
void find_keep(const Allotment& a, Finding* finding, Stream s);

}  // namespace kvlab::ops
