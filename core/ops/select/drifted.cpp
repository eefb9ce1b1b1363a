#include <kvlab/ops.hpp>

#include <algorithm>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/select/drifted.hpp"
#include "ops/select/select.hpp"

namespace kvlab::ops {
namespace {

// The overlap of a list of `count` tokens with as many of the best of n scores.
float overlap(const float* scores, int n, const IndexList& lists, std::int64_t at, int head) {
  thread_local std::vector<std::uint64_t> keys;
  thread_local std::vector<char> listed;
  const int count = lists.count(at, head), best = std::min(count, n);
  keys.clear();
  for (int t = 0; t < n; ++t) keys.push_back(selection_key(scores[t], static_cast<std::uint32_t>(t)));
  select_greatest(keys.data(), keys.size(), static_cast<std::size_t>(best));
  listed.assign(static_cast<std::size_t>(n), 0);
  for (int i = 0; i < count; ++i)
    if (lists.index(at, head, i) < n) listed[static_cast<std::size_t>(lists.index(at, head, i))] = 1;
  int both = 0;
  for (int i = 0; i < best; ++i) both += listed[selection_index(keys[static_cast<std::size_t>(i)])];
  return static_cast<float>(both) / static_cast<float>(count);
}

}  // namespace

void drifted_heads(const PagedKv& kv, View<const float, 3> scores, const TokenList& lists, float threshold,
                   const std::int32_t* leaders, HeadFlags drifted, Stream s, const Heads& heads) {
  const char* op = "drifted_heads";
  check_kv(kv, op, s);
  check_scores(kv, scores, "scores", op, s);
  check_list(kv, lists, op);
  const int window = static_cast<int>(scores.extent[1]) / kv.kv_heads;
  if (window > most_overlaps)
    fail(Errc::unsupported, op,
         "got " + std::to_string(window) + " rows of scores for a KV head, wanted at most " +
             std::to_string(most_overlaps));
  if (drifted.extent[1] < kv.kv_heads || !leaders)
    fail(Errc::internal, op, "got too few flags or no leaders, wanted [slot, kv_head] and [kv_head]");
  if (s.device() == Device::cuda)
    return on_cuda<drifted_heads>(kv, scores, lists, threshold, leaders, drifted, s, heads);
  for (int r = 0; r < kv.rows; ++r) {
    std::vector<char> moved(static_cast<std::size_t>(kv.kv_heads), 0);
#pragma omp parallel for schedule(dynamic) if (worth_threads(scores.extent[1] * longest(kv)))
    for (int h = 0; h < kv.kv_heads; ++h) {
      if (leaders[h] != h || !heads.on(kv.slots[r], h) || lists.count(lists.at(r), h) == 0) continue;
      float of_rows[most_overlaps];
      for (int i = 0; i < window; ++i)
        of_rows[i] = overlap(&scores(r, h * window + i, 0), kv.tokens(r, h), lists, lists.at(r), h);
      moved[static_cast<std::size_t>(h)] = median_of(of_rows, window) < threshold;
    }
    for (int h = 0; h < kv.kv_heads; ++h)
      drifted(kv.slots[r], h) = leaders[h] >= 0 && moved[static_cast<std::size_t>(leaders[h])];
  }
}

}  // namespace kvlab::ops
