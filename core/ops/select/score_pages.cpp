#include <kvlab/ops.hpp>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "base/device_op.hpp"
#include "base/part_timer.hpp"
#include "ops/page/check.hpp"
#include "ops/page/row_kernels.hpp"
#include "ops/score/group.hpp"
#include "ops/score/turned.hpp"
#include "ops/select/candidates.hpp"
#include "ops/select/chosen_pages.hpp"
#include "ops/select/inject.hpp"
#include "ops/select/select.hpp"

namespace kvlab::ops {
namespace {

struct Scratch {
  std::vector<float> queries, scores;
  std::vector<std::uint16_t> plain;  // f16 {1, 0} of each row: the kernel then multiplies codes
};
constexpr std::uint16_t half_of_one = 0x3c00;

// max(q lo, q hi) = min(q, 0) lo + max(q, 0) hi. So a box [lo, hi] scores as the product of one row of 2 * head_dim
// with the split query. Codes of that row share scale and zero: the score is scale * (q . codes) + zero * sum(q).
void split_query(const float* q, int dim, float* out) {
  for (int d = 0; d < dim; ++d) {
    out[d] = std::min(q[d], 0.f);
    out[dim + d] = std::max(q[d], 0.f);
  }
}

// Scores `pages` pages from `first` on.
void score_head(const View<const float, 2>& queries, const PagedKv& kv, const Summaries& summaries, int row, int head,
                int group, GroupRule rule, float scale, int first, int pages, float* out) {
  thread_local Scratch x;
  const int stride = padded(pages), dim = kv.head_dim;
  const bool box = summary_vectors(summaries.kind) == 2;
  const int width = box ? 2 * dim : dim;
  x.queries.resize(std::size_t(group) * width);
  for (int g = 0; g < group; ++g) {
    const float* q = &queries(head * group + g, 0);
    if (box)
      split_query(q, dim, x.queries.data() + std::int64_t{g} * width);
    else
      std::copy_n(q, dim, x.queries.data() + std::int64_t{g} * width);
  }
  x.scores.resize(std::size_t(group) * stride);
  RowRun runs[1 + run_ahead];
  runs[0].data = summaries.at(kv.slots[row], head, first);
  runs[0].stride = summaries.page_stride;
  runs[0].count = pages;
  if (summaries.bits == 8) {
    x.plain.resize(std::size_t(pages) * 2);
    for (int p = 0; p < pages; ++p) x.plain[2 * p] = half_of_one;
    runs[0].kind = RowKind::u8;
    runs[0].meta = x.plain.data();
  } else {
    runs[0].kind = summaries.dtype == DType::f32 ? RowKind::f32 : RowKind::bf16;
  }
  row_kernels().dot(runs, 1, width, x.queries.data(), width, group, 1.f, x.scores.data(), stride);
  if (summaries.bits == 8)
    for (int g = 0; g < group; ++g) {
      const float* q = &queries(head * group + g, 0);
      const float sum = std::accumulate(q, q + dim, 0.f);
      for (int p = 0; p < pages; ++p) {
        float shared[2];  // scale and zero
        std::memcpy(shared, summaries.at(kv.slots[row], head, first + p) + width, sizeof shared);
        float& score = x.scores[std::size_t(g) * stride + p];
        score = score * shared[0] + sum * shared[1];
      }
    }
  reduce_group(x.scores.data(), stride, group, pages, rule, scale, out);
}

void check(const Tensor<3>& queries, const PagedKv& kv, const Summaries& summaries, const Scores& out, const char* op,
           Stream s) {
  check_kv(kv, op, s);
  if (queries.dtype != DType::f32)
    fail(Errc::unsupported, op, std::string("got queries of ") + name_of(queries.dtype) + ", wanted f32");
  if (summaries.bits != 8 && summaries.dtype != DType::f32 && summaries.dtype != DType::bf16 &&
      (summaries.dtype != DType::f16 || s.device() == Device::cpu))
    fail(Errc::unsupported, op, std::string("got summaries of ") + name_of(summaries.dtype) + ", wanted f32 or bf16");
  if (summaries.kind == Summary::none || !summaries.data)
    fail(Errc::internal, op, "got no page summaries, wanted some (Needs::page_summary)");
  const View<const float, 3> q = queries.f32();
  if (q.extent[0] < kv.rows || q.extent[1] < kv.kv_heads || q.extent[1] % kv.kv_heads || q.extent[2] != kv.head_dim)
    fail(Errc::internal, op, "got queries of another shape, wanted [row, query head, head_dim]");
  if (q.stride[2] != 1 || out.stride[2] != 1)
    fail(Errc::unsupported, op, "got strided queries or scores, wanted them contiguous");
  const int most = s.device() == Device::cpu ? (longest(kv) + kv.page_size - 1) / kv.page_size : 0;
  if (out.extent[0] < kv.rows || out.extent[1] < kv.kv_heads || out.extent[2] < most)
    fail(Errc::internal, op, "got too small an output, wanted [row, kv_head, " + std::to_string(most) + " pages]");
}

}  // namespace

void page_score(const Tensor<3>& queries, const PagedKv& kv, const Summaries& summaries, GroupRule rule, float scale,
                Scores out, Stream s) {
  const PartTimer timer(Part::score);
  const char* op = "page_score";
  check(queries, kv, summaries, out, op, s);
  const View<const float, 3> q = queries.f32();
  if (s.device() == Device::cuda) return on_cuda<page_score>(queries, kv, summaries, rule, scale, out, s);
  const int most = (longest(kv) + kv.page_size - 1) / kv.page_size;
  const int group = static_cast<int>(q.extent[1]) / kv.kv_heads;
#pragma omp parallel for collapse(2) \
    schedule(dynamic) if (worth_threads(std::int64_t{kv.rows} * kv.kv_heads * most * 16))
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      if (kv.pages(r, h) > 0)
        score_head(q[r], kv, summaries, r, h, group, rule, scale, 0, kv.pages(r, h), &out(r, h, 0));
}

void score_pages(const Tensor<3>& queries, const PagedKv& kv, const Summaries& summaries, GroupRule rule, float scale,
                 View<const std::int32_t, 2> page_budgets, Pins pins, Scores scores, PageList out, Stream s) {
  PageChoice choice;
  choice.rule = rule;
  choice.scale = scale;
  choice.budgets = page_budgets;
  choice.newest_page = pins.newest_page;
  score_pages(queries, kv, summaries, choice, scores, out, s);
}

namespace {

thread_local std::vector<PutOffChoice> waiting;  // more than one: of layers

void choose(const PutOffChoice& c) {
  const bool noted = c.out.final && c.out.final->index;
  on_cuda<chosen_pages>(c.queries, c.kv, c.summaries, c.choice, c.scores, c.out, c.stream);
  // An op that wrote to the list in the meantime has cleared its note.
  if (c.out.final && !noted) c.out.final->clear();
  if (c.injects) inject_pages(*c.injects, c.stream);
}

void choose_waiting() {
  const PartTimer timer(Part::score);
  std::vector<PutOffChoice> now = std::exchange(waiting, {});
  std::optional<PutOffChoice> last;
  if (!now.back().forgotten) last = now.back(), now.pop_back();
  if (!now.empty()) only_on_cuda<chosen_in_layers>(now);
  std::vector<InjectCall> replaced;
  for (const PutOffChoice& c : now)
    if (c.injects) replaced.push_back({*c.injects, c.stream});
  if (!replaced.empty()) only_on_cuda<inject_in_layers>(replaced);
  if (last) choose(*last);
}

void put_off(const PutOffChoice& c) {
  const bool chooses = is_put_off(choose_waiting);
  if (chooses && may_join_put_off() && waiting.back().forgotten) {
    waiting.push_back(c);
    return;
  }
  // Attention may find the heads that the choice is for, too.
  const PutOffTurns* turns = put_off_turns();
  if (chooses || !turns || !turns->flags(c.choice.heads)) run_put_off();
  waiting = {c};
  if (!c.injects &&
      chooses_at_once(c.kv, c.summaries, static_cast<int>(c.queries.extent[1]) / c.kv.kv_heads, c.scores) &&
      is_final(c.kv, c.choice, c.scores, c.out))
    c.out.final->set(c.out, c.kv);
  kvlab::put_off(choose_waiting);
}

// What replaces the list of a choice where an experiment injects others.
InjectArgs injected(const PagedKv& kv, const PageChoice& c, const PageList& out) {
  InjectArgs a = *kv.injected->lists;
  a.pages = kv;
  a.pages.injected = nullptr;
  a.list = out;
  a.pins = c.leave_out;
  a.pins.newest_page = c.newest_page;
  a.heads = c.heads;
  kv.injected->used->lists = true;
  return a;
}

}  // namespace

void score_pages(const Tensor<3>& queries, const PagedKv& kv, const Summaries& summaries, const PageChoice& c,
                 Scores scores, PageList out, Stream s) {
  const PartTimer timer(Part::score);
  const char* op = "score_pages";
  check(queries, kv, summaries, scores, op, s);
  check_list(kv, out, op);
  if (c.budgets && (c.budgets.extent[0] < kv.rows || c.budgets.extent[1] < kv.kv_heads))
    fail(Errc::internal, op, "got too few page budgets, wanted [row, kv_head]");
  std::optional<InjectArgs> injects;
  if (kv.injected && kv.injected->lists) injects = injected(kv, c, out);
  if (s.device() == Device::cuda && may_put_off() && (!injects || may_join_put_off()))
    return put_off({queries, kv, summaries, c, scores, out, s, false, injects});
  if (s.device() == Device::cuda)
    on_cuda<chosen_pages>(queries, kv, summaries, c, scores, out, s);
  else
    chosen_pages(queries, kv, summaries, c, scores, out, s);
  const PartTimer other(Part::other);
  if (injects) inject_pages(*injects, s);
}

const PutOffChoice* put_off_choice() {
  return is_put_off(choose_waiting) && !waiting.back().injects ? &waiting.back() : nullptr;
}
void forget_put_off_scores() {
  for (PutOffChoice& c : waiting) c.forgotten = true;
}

// The two overloads of score_pages have one CUDA version under this name.
void chosen_pages(const Tensor<3>& queries, const PagedKv& kv, const Summaries& summaries, const PageChoice& c,
                  Scores scores, PageList out, Stream) {
  const View<const float, 3> q = queries.f32();
  const int most = (longest(kv) + kv.page_size - 1) / kv.page_size;
  const int group = static_cast<int>(q.extent[1]) / kv.kv_heads;
  int short_by = 0;  // entries of the longest list that has no room; a thread must not throw
#pragma omp parallel for collapse(2) schedule(dynamic) \
    reduction(max                                      \
              : short_by) if (worth_threads(std::int64_t{kv.rows} * kv.kv_heads * most * 16))
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      if (!c.heads.on(kv.slots[r], h)) continue;
      const Candidates pages = candidates(kv.tokens(r, h), kv.page_size, c.leave_out);
      const int n = pages.count(), budget = c.budgets ? c.budgets(r, h) : c.budget;
      const bool newest = c.newest_page && n > 0 && pages.last == kv.pages(r, h);
      const int wanted = std::max<int>(newest, std::min(n, std::max(0, budget)));
      if (n > 0)
        score_head(q[r], kv, summaries, r, h, group, c.rule, c.scale, pages.first, n, &scores(r, h, pages.first));
      if (out.index.extent[2] < wanted) {
        short_by = std::max(short_by, wanted);
        continue;
      }
      thread_local std::vector<std::uint64_t> keys;
      keys.clear();
      for (int p = pages.first; p < pages.last - newest; ++p)
        keys.push_back(selection_key(scores(r, h, p), static_cast<std::uint32_t>(p)));
      const int best = wanted - newest;
      select_greatest(keys.data(), keys.size(), static_cast<std::size_t>(best));
      std::sort(keys.begin(), keys.begin() + best,
                [](std::uint64_t a, std::uint64_t b) { return selection_index(a) < selection_index(b); });
      const std::int64_t at = out.at(r);
      for (int i = 0; i < best; ++i)
        out.index(at, h, i) = static_cast<std::int32_t>(selection_index(keys[static_cast<std::size_t>(i)]));
      if (newest) out.index(at, h, best) = pages.last - 1;
      out.count(at, h) = wanted;
    }
  if (short_by > 0)
    fail(Errc::internal, "score_pages",
         "got a list with room for " + std::to_string(out.index.extent[2]) + ", wanted " + std::to_string(short_by));
}

}  // namespace kvlab::ops
