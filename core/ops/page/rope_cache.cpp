#include "ops/page/rope_cache.hpp"

#include <algorithm>
#include <mutex>

#include "ops/page/paged.hpp"

namespace kvlab::ops {
namespace {

bool same_table(const RopeRows& rows, const RopeTable& rope) {
  return rows.half() * 2 == rope.head_dim && rows.attention_scale == rope.attention_scale &&
         std::equal(rows.inv_freq.begin(), rows.inv_freq.end(), rope.inv_freq);
}

}  // namespace

std::shared_ptr<const RopeRows> rope_rows(const RopeTable& rope, int count) {
  static std::mutex mutex;
  static std::vector<std::shared_ptr<const RopeRows>> tables;
  const std::lock_guard lock(mutex);
  const auto it = std::find_if(tables.begin(), tables.end(), [&](const auto& t) { return same_table(*t, rope); });
  if (it != tables.end() && (*it)->count >= count) return *it;

  auto grown = std::make_shared<RopeRows>();
  grown->inv_freq.assign(rope.inv_freq, rope.inv_freq + rope.head_dim / 2);
  grown->attention_scale = rope.attention_scale;
  grown->count = std::max({count, 256, it != tables.end() ? 2 * (*it)->count : 0});
  grown->cosine.resize(std::size_t(grown->count) * grown->half());
  grown->sine.resize(grown->cosine.size());
  for (int r = 0; r < grown->count; ++r) {
    const std::size_t at = std::size_t(r) * grown->half();
    rope_angles(rope, r, grown->cosine.data() + at, grown->sine.data() + at);
  }
  if (it != tables.end())
    *it = grown;
  else
    tables.push_back(grown);
  return grown;
}

}  // namespace kvlab::ops
