// What a run of the full cache may have attended to, for policies that ask for future mass. The numbers are made up.
#pragma once
#include <cstdint>
#include <vector>

#include "engine/foresight.hpp"

namespace kvlab::test {

// Each step gives the tokens of a KV head numbers of [0, 1) that layer, head and step decide. Nothing else matters: so
// a sequence keeps the same tokens in any slot of any batch.
class MadeUpFuture final : public RecordedMass {
 public:
  MadeUpFuture() {
    std::uint32_t x = 1;
    for (float& f : numbers_) f = static_cast<float>((x = x * 1664525u + 1013904223u) >> 8) / 16777216.f;
  }
  std::span<const float> from(std::uint32_t, bool, int step, int layer, int head) const override {
    return std::span(numbers_).subspan(static_cast<std::size_t>(head * 131 + layer * 1031 + step * 17), longest);
  }

 private:
  static constexpr std::size_t longest = 8192;
  std::vector<float> numbers_ = std::vector<float>(longest * 8);
};

inline const RecordedMass* made_up_future() {
  static const MadeUpFuture all;
  return &all;
}

}  // namespace kvlab::test
