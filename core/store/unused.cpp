#include "store/unused.hpp"

#include <array>
#include <numeric>
#include <utility>
#include <vector>

#include "store/cuda_store.hpp"
#include "store/store.hpp"

namespace kvlab {
namespace {

// Adds so many empty places of frames, with the ledger's tags.
void add_places(const PageLayout& l, std::int64_t places, Ledger::Row& sum) {
  const std::int64_t columns = std::int64_t{l.state_columns} * l.page_size * 4;
  const std::pair<Tag, std::int64_t> parts[] = {{Tag::keys, l.v - l.k},
                                                {Tag::values, l.k_meta - l.v},
                                                {Tag::codec_metadata, l.positions - l.k_meta},
                                                {Tag::positions, l.bytes - l.positions - columns},
                                                {Tag::scores, columns}};
  for (const auto& [tag, bytes] : parts) sum[static_cast<std::size_t>(tag)] += bytes * places / l.page_size;
}

// Room for tokens in partly filled last pages, by the pool that CudaStore has for such frames.
std::array<std::int64_t, pools> empty_places(const Store& store) {
  if (const auto* cuda = dynamic_cast<const CudaStore*>(&store)) return cuda->empty_places();
  const Shape& s = store.shape();
  std::vector<std::int32_t> slots(static_cast<std::size_t>(s.max_slots));
  std::iota(slots.begin(), slots.end(), 0);
  std::array<std::int64_t, pools> places = {};
  for (int layer = 0; layer < s.layers; ++layer)
    for (const Tier tier : {Tier::device, Tier::host}) {
      const PagedKv kv = store.view(layer, slots, tier);
      for (int slot = 0; slot < s.max_slots; ++slot)
        for (int head = 0; head < s.kv_heads; ++head) {
          if (const int tokens = store.length(layer, slot, head); tokens > 0) {
            const PageEntry& last = kv.entry(slot, head, (tokens - 1) / s.page_size);
            const CudaPool pool = tier == Tier::host ? host_pool : last.codec > 0 ? lower_pool : device_pool;
            if (last.frame != null_frame) places[pool] += s.page_size - last.tokens;
          }
          if (const int tokens = store.archived(layer, slot, head); tier == Tier::host && tokens > 0)
            places[host_pool] += s.page_size - 1 - (tokens - 1) % s.page_size;
        }
    }
  return places;
}

}  // namespace

std::array<Ledger::Rows, 2> unused_bytes(const Store& store) {
  const StoreOptions& o = store.options();
  const auto places = empty_places(store);
  std::array<Ledger::Rows, 2> sums{};
  const auto add = [&](Tier tier, Stored as, const CodecSpec& codec, CudaPool pool) {
    add_places(frame_layout(o, codec), places[pool],
               sums[static_cast<std::size_t>(tier)][static_cast<std::size_t>(as)]);
  };
  add(Tier::host, Stored::host, o.host_codec, host_pool);
  add(Tier::device, Stored::first, o.codecs[0], device_pool);
  if (o.codecs.size() > 1) add(Tier::device, Stored::second, o.codecs[1], lower_pool);
  return sums;
}

}  // namespace kvlab
