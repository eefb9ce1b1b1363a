#include <kvlab/turns.hpp>

#include "base/device_op.hpp"

namespace kvlab::ops {

void take_turns(const PagedKv& kv, const std::int32_t* steps, const float* lead, bool begins, std::int32_t* turns,
                Stream s) {
  if (s.device() == Device::cuda) return on_cuda<take_turns>(kv, steps, lead, begins, turns, s);
  for (int r = 0; r < kv.rows; ++r) {
    const std::int32_t slot = kv.slots[r];
    turns[slot] = begins && steps[slot] == 0 ? 0 : steps[slot] + static_cast<std::int32_t>(lead[slot]);
  }
}

}  // namespace kvlab::ops
