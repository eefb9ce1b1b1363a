#include "cases/place.hpp"

#include <algorithm>
#include <cstring>

namespace kvlab::cases {
namespace {

constexpr std::size_t margin = 256;  // also the alignment of what a place gives
constexpr std::byte guard{0xA5};

}  // namespace

std::byte* Place::take_bytes(std::size_t bytes) {
  const std::size_t margins = stream().device() == Device::cuda ? 0 : 2 * margin;
  Block& block = blocks_.emplace_back(Block{StreamMemory(stream(), std::max<std::size_t>(bytes, 1) + margins), bytes});
  auto* data = block.memory.as<std::byte>();
  if (margins == 0) return data;
  std::memset(data, static_cast<int>(guard), margin);
  std::memset(data + margin + bytes, static_cast<int>(guard), margin);
  return data + margin;
}

bool Place::margins_intact() const {
  if (stream().device() == Device::cuda) return true;
  return std::all_of(blocks_.begin(), blocks_.end(), [](const Block& b) {
    const auto* data = b.memory.as<std::byte>();
    const auto whole = [](const std::byte* at) {
      return std::all_of(at, at + margin, [](std::byte x) { return x == guard; });
    };
    return whole(data) && whole(data + margin + b.bytes);
  });
}

PagedKv Place::put(PagedKv kv, std::size_t arena_bytes) {
  kv.base = put(kv.base, arena_bytes);
  kv.table = put(kv.table);
  kv.length = put(kv.length);
  if (kv.lower_pages) kv.lower_pages = put(kv.lower_pages);
  kv.slots = put(kv.slots, static_cast<std::size_t>(kv.rows));
  if (kv.rope_table.inv_freq)
    kv.rope_table.inv_freq = put(kv.rope_table.inv_freq, static_cast<std::size_t>(kv.head_dim / 2));
  return kv;
}

}  // namespace kvlab::cases
