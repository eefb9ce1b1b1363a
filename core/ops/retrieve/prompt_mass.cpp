#include "ops/retrieve/prompt_mass.hpp"

#include <kvlab/ops.hpp>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "base/device_op.hpp"
#include "base/per_thread.hpp"
#include "ops/page/check.hpp"
#include "ops/page/extents.hpp"
#include "ops/page/paged.hpp"

namespace kvlab::ops {

constexpr int votes_together = 64;  // queries whose logits are scratch at once

namespace {

// What the chunk's queries give a place of their windows.
void add_place(const LayerPrefill& kv, int newest, std::int64_t query_head, int place, float* key, float& mass) {
  const View<const float, 4> q = kv.chunk_queries.f32();
  const int count = static_cast<int>(q.extent[2]), first = kv.position[0] - count;  // place of the first query
  const int head = static_cast<int>(query_head / (q.extent[1] / kv.kv_heads())), page = place / kv.pages.page_size;
  const PageEntry& e = kv.pages.entry(0, head, page);
  read_row(kv.pages.frame(e), kv.pages.layout(e), KvSide::key, place % kv.pages.page_size, key);
  const double scale = 1 / std::sqrt(static_cast<double>(q.extent[3]));
  double sum = 0;
  for (int i = std::max(0, place - first); i < std::min(count, place - first + newest); ++i) {
    double x = 0;
    for (std::int64_t d = 0; d < q.extent[3]; ++d) x += double{q(0, query_head, i, d)} * double{key[d]};
    sum += std::exp(x * scale - double{kv.lse(0, query_head, i)});
  }
  mass += static_cast<float>(sum);
}

}  // namespace

bool prompt_mass_at_once(const LayerPrefill& kv, int newest, const KeyBlocks& blocks, Stream s) {
  if (!kv.lse) return false;
  if (s.device() == Device::cuda) return on_cuda<prompt_mass_at_once>(kv, newest, blocks, s);
  const View<const float, 4> q = kv.chunk_queries.f32();
  const int end = kv.position[0], from = std::max(0, end - static_cast<int>(q.extent[2]) + 1 - newest);
  for (int h = 0; h < kv.kv_heads(); ++h)
    for (int page = from / kv.pages.page_size; page * kv.pages.page_size < end; ++page)
      check_page(kv.pages, 0, h, page, "add_prompt_mass");
  PerThread<float> keys(static_cast<std::size_t>(q.extent[3]));
#pragma omp parallel for collapse(2) schedule(static) if (worth_threads((end - from) * q.extent[1] * q.extent[2]))
  for (std::int64_t head = 0; head < q.extent[1]; ++head)
    for (int t = from; t < end; ++t)
      add_place(kv, newest, head, t, keys.own().data(), blocks.mass(kv.slots[0], head, t));
  return true;
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
