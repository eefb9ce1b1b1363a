#include "engine/foresight.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace kvlab {

namespace {

// A step's numbers of all layers go to the GPU at once, where they take no more.
constexpr std::size_t most_at_once = std::size_t{64} << 20;

}  // namespace

// The numbers of `layers` layers from `first` on: [layer, row, KV head, text position].
std::vector<float> Foresight::table(const LayerKv& kv, int first, int layers, int text) const {
  const int rows = kv.rows(), heads = kv.kv_heads();
  const bool prompt = static_cast<bool>(kv.chunk_queries);
  std::vector<float> all(static_cast<std::size_t>(layers * rows) * static_cast<std::size_t>(heads * text));
  float* to = all.data();
  for (int layer = first; layer < first + layers; ++layer)
    for (int row = 0; row < rows; ++row)
      for (int head = 0; head < heads; ++head, to += text) {
        const std::span<const float> mass = recorded_.from(questions_[static_cast<std::size_t>(kv.slots[row])], prompt,
                                                           prompt ? 0 : kv.step[row] + 1, layer, head);
        std::copy_n(mass.begin(), std::min(mass.size(), static_cast<std::size_t>(text)), to);
      }
  return all;
}

// The recorded numbers lie in host memory, by text position. The store puts them in the order of its places, since
// nobody else knows that order without a wait for the GPU. A copy from pageable memory waits, too, so a step has one.
View<const float, 3> Foresight::of(const LayerKv& kv) const {
  const int rows = kv.rows(), heads = kv.kv_heads(), text = 1 + *std::max_element(kv.position, kv.position + rows);
  const int layers = store_.shape().layers;
  const std::array<std::int64_t, 3> extent = {rows, heads, text};
  const std::size_t each = static_cast<std::size_t>(rows * heads) * static_cast<std::size_t>(text);
  View<const float, 3> by_position;
  const bool at_once = store_.stream().device() == Device::cuda && !kv.chunk_queries &&
                       each * static_cast<std::size_t>(layers) * sizeof(float) <= most_at_once;
  if (at_once) {
    Step now;
    for (int row = 0; row < rows; ++row) now.push_back({kv.slots[row], kv.position[row], kv.step[row]});
    if (kv.layer <= last_layer_ || now != now_) {
      const std::vector<float> all = table(kv, 0, layers, text);
      if (all_.bytes() < all.size() * sizeof(float))
        all_ = StreamMemory(store_.stream(), std::min(2 * all.size() * sizeof(float), most_at_once));
      copy_memory(all_.as<>(), all.data(), all.size() * sizeof(float), store_.stream());
      now_ = std::move(now);
    }
    last_layer_ = kv.layer;
    by_position = View<const float, 3>::dense(all_.as<float>() + each * static_cast<std::size_t>(kv.layer), extent);
  } else {
    by_position =
        upload(*kv.workspace, "future mass of the text", table(kv, kv.layer, 1, text).data(), {rows, heads, text});
  }
  const View<float, 3> out = kv.scratch<float>("future mass", {rows, heads, kv.max_length});
  store_.by_place(kv.layer, {kv.slots, static_cast<std::size_t>(rows)}, by_position, out);
  return out;
}

}  // namespace kvlab
