#include "engine/foresight.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvlab {

// The recorded numbers lie in host memory, by text position. The store puts them in the order of its places, since
// nobody else knows that order without a wait for the GPU in each layer.
View<const float, 3> Foresight::of(const LayerKv& kv) const {
  const int rows = kv.rows(), heads = kv.kv_heads(), text = 1 + *std::max_element(kv.position, kv.position + rows);
  std::vector<float> all(static_cast<std::size_t>(rows) * static_cast<std::size_t>(heads * text));
  float* to = all.data();
  for (int row = 0; row < rows; ++row) {
    const std::uint32_t question = questions_[static_cast<std::size_t>(kv.slots[row])];
    const bool prompt = static_cast<bool>(kv.chunk_queries);
    for (int head = 0; head < heads; ++head, to += text) {
      const std::span<const float> mass =
          recorded_.from(question, prompt, prompt ? 0 : kv.step[row] + 1, kv.layer, head);
      std::copy_n(mass.begin(), std::min(mass.size(), static_cast<std::size_t>(text)), to);
    }
  }
  const View<const float, 3> by_position =
      upload(*kv.workspace, "future mass of the text", all.data(), {rows, heads, text});
  const View<float, 3> out = kv.scratch<float>("future mass", {rows, heads, kv.max_length});
  store_.by_place(kv.layer, {kv.slots, static_cast<std::size_t>(rows)}, by_position, out);
  return out;
}

}  // namespace kvlab
