// The work of ops::score_pages after its checks.
#pragma once
#include <kvlab/ops.hpp>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "ops/page/final_list.hpp"
#include "ops/select/inject.hpp"

namespace kvlab::ops {

void chosen_pages(const Tensor<3>& queries, const PagedKv& kv, const Summaries& summaries, const PageChoice& choice,
                  Scores scores, PageList out, Stream s);

// A choice of score_pages on CUDA that attention may make in its own launch (base/put_off.hpp).
struct PutOffChoice {
  Tensor<3> queries;
  PagedKv kv;
  Summaries summaries;
  PageChoice choice;
  Scores scores;
  PageList out;
  Stream stream;
  bool forgotten = false;                  // nobody reads the scores any more, and their memory serves others
  std::optional<InjectArgs> injects = {};  // replaces the list afterwards
};
// The choice that waits, or null. None whose list an experiment replaces.
const PutOffChoice* put_off_choice();
// Of the choices that wait, nobody reads scores any more.
void forget_put_off_scores();

// Makes choices of several layers, CUDA only. Where they differ in nothing but memory at a constant distance from layer
// to layer, a launch makes those of many rows and layers. Scores go to memory of its own.
void chosen_in_layers(const std::vector<PutOffChoice>& choices);

// On CUDA: whether tensor cores score the summaries of pages, for a group of query heads, and whether the same launch
// chooses.
inline constexpr int most_fused_pages = 12288;  // pages of a head whose scores fit shared memory
inline bool scores_by_tiles(const PagedKv& kv, const Summaries& s, int group) {
  const int dim = kv.head_dim;
  if ((dim != 64 && dim != 96 && dim != 128 && dim != 256) || s.slot_stride % 16 || s.head_stride % 16 ||
      s.page_stride % 16 || reinterpret_cast<std::uintptr_t>(s.data) % 16)
    return false;
  if (s.bits == 8)  // the kernel with rings alone takes codes, of both ends or means in 64 bytes at once
    return summary_vectors(s.kind) * dim % 64 == 0 && group <= 8 && kv.kv_heads <= 768 &&
           s.page_stride * kv.table.extent[2] <= std::int64_t{1} << 30;
  return (s.dtype == DType::bf16 || s.dtype == DType::f16) && group <= 16 && kv.kv_heads <= 1024;
}
inline bool chooses_at_once(const PagedKv& kv, const Summaries& s, int group, const Scores& scores) {
  return scores_by_tiles(kv, s, group) && std::min(kv.table.extent[2], scores.extent[2]) <= most_fused_pages;
}

// Whether attention will read just the list that `c` gives. It has room for every page.
inline bool is_final(const PagedKv& kv, const PageChoice& c, const Scores& scores, const PageList& out) {
  if (!out.final || out.slots || c.heads.flags.data || c.heads.steps || c.heads.classes) return false;
  const Pins &left_out = c.leave_out, &pins = out.final->pins;
  return left_out.first <= 0 && left_out.last <= 0 && pins.first <= 0 && pins.last <= 0 &&
         (!pins.newest_page || c.newest_page) && out.index.extent[2] >= kv.table.extent[2] &&
         scores.extent[2] >= kv.table.extent[2];
}

}  // namespace kvlab::ops
