#include "ops/score/verify.hpp"

#include <algorithm>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/page/paged.hpp"

namespace kvlab::ops {

void find_nan(const PagedKv& kv, int layer, const Scores& scores, Finding* finding, Stream s) {
  if (s.device() == Device::cuda) return on_cuda<find_nan>(kv, layer, scores, finding, s);
  std::vector<std::int32_t> position;
  for (int row = 0; row < kv.rows; ++row)
    for (int head = 0; head < kv.kv_heads; ++head) {
      const int n = kv.tokens(row, head);
      if (n == 0) continue;
      const float* of_head = &scores(row, head, 0);
      int bad = 0;
      for (int t = 0; t < n; ++t) bad += of_head[t] != of_head[t];
      if (bad == 0) continue;
      finding->count += static_cast<std::uint64_t>(bad);
      position.resize(static_cast<std::size_t>(n));
      token_positions(kv, row, head, n, position.data());
      for (int t = 0; t < n; ++t)
        if (of_head[t] != of_head[t])
          finding->first = std::max(finding->first, Finding::key(layer, head, position[static_cast<std::size_t>(t)]));
    }
}

void find_keep(const Allotment& a, std::int64_t* kept, Finding* finding, Stream s) {
  if (s.device() == Device::cuda) return on_cuda<find_keep>(a, kept, finding, s);
  const int layer = a.kv ? a.kv->layer : a.layer;
  const std::int64_t heads = a.keep.extent[1], places = heads * a.layers;
  for (std::int64_t r = 0; r < a.keep.extent[0]; ++r) {
    if (a.layer == 0) kept[r] = 0;
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::int32_t keep = a.keep(r, h);
      kept[r] += keep;
      if (keep >= 0 && keep <= a.length(r, h)) continue;
      ++finding->count;
      finding->first = std::max(finding->first, Finding::key(layer, static_cast<int>(h), keep));
    }
    if (a.layer + 1 < a.layers) continue;
    const std::int64_t pinned = a.pins ? std::int64_t{a.pins[r].first} + a.pins[r].last : 0;
    if (kept[r] > places * (a.total[r] + 1 + pinned))
      finding->over = std::max(
          finding->over, static_cast<std::uint64_t>(kept[r]) << 32 | static_cast<std::uint64_t>(places * a.total[r]));
  }
}

}  // namespace kvlab::ops
