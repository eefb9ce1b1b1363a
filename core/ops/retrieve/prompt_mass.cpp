#include "ops/retrieve/prompt_mass.hpp"

#include <kvlab/ops.hpp>

#include <algorithm>
#include <string>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/page/extents.hpp"

namespace kvlab::ops {

constexpr int votes_together = 64;  // queries whose logits are scratch at once

bool prompt_mass_at_once(const LayerPrefill& kv, int newest, const KeyBlocks& blocks, Stream s) {
  return s.device() == Device::cuda && kv.lse && on_cuda<prompt_mass_at_once>(kv, newest, blocks, s);
}

void add_prompt_mass(const LayerPrefill& kv, int newest, const KeyBlocks& blocks, Stream s) {
  const char* op = "add_prompt_mass";
  check_kv(kv.pages, op, s);
  if (newest < 1) fail(Errc::internal, op, "got " + std::to_string(newest) + " newest tokens, wanted at least 1");
  if (kv.rows() != 1 || kv.chunk_queries.dtype != DType::f32)
    fail(Errc::internal, op, "got no chunk of one prompt in f32, wanted what Policy::prefill gets");
  const View<const float, 4> q = kv.chunk_queries.f32();
  const auto count = static_cast<int>(q.extent[2]);
  if (q.extent[1] != blocks.mass.extent[1] || q.extent[3] != kv.pages.head_dim || q.stride[3] != 1 ||
      blocks.mass.extent[2] < kv.position[0] || blocks.mass.stride[2] != 1)
    fail(Errc::internal, op,
         "got queries " + extents(q) + " and sums " + extents(blocks.mass) +
             ", wanted sums of as many query heads, of " + std::to_string(kv.position[0]) + " tokens, dense");
  if (kv.lse && (kv.lse.extent[1] != q.extent[1] || kv.lse.extent[2] != q.extent[2]))
    fail(Errc::internal, op, "got lse " + extents(kv.lse) + ", wanted one of each of the queries " + extents(q));
  if (count == 0 || prompt_mass_at_once(kv, newest, blocks, s)) return;
  std::vector<std::int32_t> seen;
  for (int end = votes_together; end < count + votes_together; end += votes_together)
    seen.push_back(kv.position[0] - count + std::min(end, count));
  const std::int32_t* seen_by = upload(*kv.workspace, op, seen.data(), {std::ssize(seen)}).data;
  const Scores votes = kv.query_head_scores("votes of a prompt");
  for (int first = 0, i = 0; first < count; first += votes_together, ++i) {
    View<const float, 4> some = q;
    some.data += first * q.stride[2];
    some.extent[2] = std::min(votes_together, count - first);
    window_votes(some, seen_by + i, kv.pages, votes, s, {}, newest);
    add_block_mass(kv.pages, votes, 0, blocks, s);
  }
}

}  // namespace kvlab::ops
