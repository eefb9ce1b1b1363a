#include "engine/foresight.hpp"

#include <cstddef>

namespace kvlab {

// The recorded numbers lie in host memory, by text position, and the callback's tokens lie in the order of their
// places.
View<const float, 3> Foresight::of(const LayerKv& kv) const {
  const std::int64_t extent[] = {kv.rows(), kv.kv_heads(), kv.max_length};
  std::vector<float> all(static_cast<std::size_t>(extent[0] * extent[1] * extent[2]));
  float* out = all.data();
  for (int row = 0; row < kv.rows(); ++row) {
    const int slot = kv.slots[row];
    const bool prompt = static_cast<bool>(kv.chunk_queries);
    const int next = prompt ? 0 : kv.step[row] + 1;
    for (int head = 0; head < kv.kv_heads(); ++head, out += kv.max_length) {
      const std::span<const float> mass =
          recorded_.from(questions_[static_cast<std::size_t>(slot)], prompt, next, kv.layer, head);
      const std::vector<std::int32_t> positions = store_.positions_by_place(kv.layer, slot, head);
      for (std::size_t t = 0; t < positions.size(); ++t)
        if (const auto p = static_cast<std::size_t>(positions[t]); p < mass.size()) out[t] = mass[p];
    }
  }
  return upload(*kv.workspace, "future mass", all.data(), {extent[0], extent[1], extent[2]});
}

}  // namespace kvlab
