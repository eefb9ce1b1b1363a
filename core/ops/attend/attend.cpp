#include "ops/attend/attend.hpp"

#include <omp.h>
#include <kvlab/ops.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <string>

#include "base/device_op.hpp"
#include "ops/attend/attend_plan.hpp"
#include "ops/page/check.hpp"

namespace kvlab::ops {
namespace {

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

void check(const AttendArgs& a, int group) {
  const char* op = "attend";
  const PagedKv& kv = a.kv;
  if (a.queries.extent[0] < kv.rows || a.queries.extent[1] % kv.kv_heads || group < 1 ||
      a.queries.extent[2] != kv.head_dim)
    fail(Errc::internal, op, "got queries of another shape, wanted [row, query head, head_dim]");
  for (int i = 0; i < 3; ++i)
    if (a.out.extent[i] < a.queries.extent[i])
      fail(Errc::internal, op, "got too small an output, wanted that of queries");
  if (a.queries.stride[2] != 1 || a.out.stride[2] != 1)
    fail(Errc::unsupported, op, "got strided heads, wanted head_dim contiguous");
  if (a.lse && (a.lse.extent[0] < kv.rows || a.lse.extent[1] < a.queries.extent[1]))
    fail(Errc::internal, op, "got too small an lse, wanted [row, query head]");
  if (a.mass) {
    if (a.mass.extent[1] < a.queries.extent[1]) fail(Errc::internal, op, "got mass of too few query heads");
  } else if (a.mass_into.column >= 0) {
    fail(Errc::internal, op, "got token state to add mass to, and no room for the mass");
  }
  if (a.logits.out) {
    if (a.pages || a.tokens || a.mass)
      fail(Errc::internal, op, "got logits to keep with a list or mass, wanted them alone");
    if (!a.logits.index || a.logits.out.extent[0] < kv.rows || a.logits.out.extent[3] != group ||
        a.logits.out.stride[3] != 1 || a.logits.out.stride[2] != group)
      fail(Errc::internal, op, "got logits of another shape, wanted dense [row, i, token, query head of the group]");
  }
  if (a.bias) {
    if (a.pages || a.mass || a.logits.out)
      fail(Errc::internal, op, "got a bias with a list of pages, mass or logits to keep, wanted none of these");
    if (a.bias.extent[0] < kv.rows || a.bias.extent[1] < a.queries.extent[1] || a.bias.stride[2] != 1)
      fail(Errc::internal, op, "got a bias of another shape, wanted [row, query head, token]");
  }
  if (a.most_distance > 0 && (!a.last || !kv.rope_table.inv_freq || kv.rope != RopeRegime::original))
    fail(Errc::internal, op,
         "got a distance to clamp without query positions or a RoPE table, or keys that RoPE turns by rank, wanted "
         "`last` and keys that it turned by text positions");
  if ((a.window > 0 || a.masks) && !a.last)
    fail(Errc::internal, op, "got a window or masks without query positions, wanted `last`");
  if (a.pages && a.tokens) fail(Errc::internal, op, "got a list of pages and a list of tokens, wanted one of the two");
  if (const IndexList* list = a.pages ? static_cast<const IndexList*>(a.pages) : a.tokens;
      list && (list->index.extent[0] < kv.rows || list->index.extent[1] < kv.kv_heads ||
               list->count.extent[0] < kv.rows || list->count.extent[1] < kv.kv_heads))
    fail(Errc::internal, op, "got too small a list of pages or tokens, wanted [row, kv_head]");
}

// Partial results of query heads: maximum, sum, then head_dim weighted values.
struct Partials {
  float* data;
  std::int64_t stride;
  float& maximum(std::int64_t i) const { return data[i * stride]; }
  float& total(std::int64_t i) const { return data[i * stride + 1]; }
  float* values(std::int64_t i) const { return data + i * stride + row_pad; }
};

struct Chunk {
  std::vector<Piece> pieces, next;
  std::vector<RowRun> runs;  // keys, values, then the next chunk's first keys
  GroupedRows grouped;
  std::vector<float> scores;
  std::vector<std::int32_t> position, rank;
};

// Sets the scores of tokens that the window or the mask hides to -inf. Returns whether a token is left.
bool apply_window(const AttendArgs& a, const AttendTask& task, int tokens, int group, Chunk& x, std::int64_t stride) {
  x.position.clear();
  for (const Piece& piece : x.pieces) {
    const PageEntry& e = a.kv.entry(task.row, task.head, piece.page);
    const auto* p = reinterpret_cast<const std::int32_t*>(a.kv.frame(e) + a.kv.layout(e).positions) + piece.begin;
    x.position.insert(x.position.end(), p, p + piece.count);
  }
  const int last = a.last[task.row];
  bool any = false;
  for (int t = 0; t < tokens; ++t) {
    const bool hidden = (a.window > 0 && x.position[t] <= last - a.window) ||
                        (a.masks && a.masks[task.head].hides(x.position[t], last));
    any |= !hidden;
    for (int g = 0; hidden && g < group; ++g) x.scores[g * stride + t] = minus_infinity;
  }
  return any;
}

// Adds the bias to a chunk's scores. Returns whether a query head of the group reads a token.
bool apply_bias(const AttendArgs& a, const AttendTask& task, int group, Chunk& x, std::int64_t stride) {
  bool any = false;
  for (int g = 0; g < group; ++g) {
    const float* bias = &a.bias(task.row, task.head * group + g, 0);
    float* s = x.scores.data() + g * stride;
    for (const Piece& piece : x.pieces) {
      const float* of_piece = bias + std::int64_t{piece.page} * a.kv.page_size + piece.begin;
      for (int i = 0; i < piece.count; ++i, ++s) *s += of_piece[i], any |= *s != minus_infinity;
    }
  }
  return any;
}

// Leaves a chunk's scores of all query heads of the group.
void keep_logits(const AttendArgs& a, const AttendTask& task, const Chunk& x, std::int64_t stride) {
  const PagedKv& kv = a.kv;
  const int group = static_cast<int>(a.logits.out.extent[3]);
  float* to = a.logits.of(task.row, kv.slots[task.row], task.head, kv.tokens(task.row, task.head));
  if (!to) return;
  const float* s = x.scores.data();
  for (const Piece& piece : x.pieces)
    for (int i = 0; i < piece.count; ++i, ++s) {
      float* of_token = to + (std::int64_t{piece.page} * kv.page_size + piece.begin + i) * group;
      for (int g = 0; g < group; ++g) of_token[g] = s[g * stride] * std::numbers::log2e_v<float>;
    }
}

// Computes one chunk's probabilities, relative to the chunk's maximum, for all query heads of the group, then their
// weighted values.
void attend_chunk(const AttendArgs& a, const AttendPlan& plan, int index, int group, float softmax_scale,
                  Partials partials) {
  thread_local Chunk x;
  const PagedKv& kv = a.kv;
  const RowKernels& kernels = row_kernels();
  const AttendTask& task = plan.tasks()[index];
  const int dim = kv.head_dim, head = task.head * group;
  x.pieces.clear();
  plan.pieces(kv, task.row, task.head, task.chunk, std::numeric_limits<int>::max(), x.pieces);
  const int pieces = static_cast<int>(x.pieces.size());
  x.runs.clear();
  x.grouped.clear();
  const auto run_of = [&](const AttendTask& of, const Piece& piece, KvSide side) {
    return page_run(kv, kv.entry(of.row, of.head, piece.page), side, piece.begin, piece.count, x.grouped);
  };
  for (const KvSide side : {KvSide::key, KvSide::value})
    for (const Piece& piece : x.pieces) x.runs.push_back(run_of(task, piece, side));
  if (index + 1 < static_cast<int>(plan.tasks().size())) {
    const AttendTask& next = plan.tasks()[index + 1];
    x.next.clear();
    plan.pieces(kv, next.row, next.head, next.chunk, run_ahead, x.next);
    for (const Piece& piece : x.next)
      if (!kv.layout(kv.entry(next.row, next.head, piece.page)).codec.k.grouped())
        x.runs.push_back(run_of(next, piece, KvSide::key));
  }
  x.runs.resize(2 * pieces + run_ahead);

  int tokens = 0;
  for (const Piece& piece : x.pieces) tokens += piece.count;
  const std::int64_t stride = padded(tokens);
  if (x.scores.size() < std::size_t(stride) * group) x.scores.resize(std::size_t(stride) * group);
  const float* q = &a.queries(task.row, head, 0);
  if (const std::int32_t* rank = plan.ranks().of(task.row, task.head)) {
    x.rank.clear();
    for (const Piece& piece : x.pieces) {
      const std::int32_t* of_piece = rank + std::int64_t{piece.page} * kv.page_size + piece.begin;
      x.rank.insert(x.rank.end(), of_piece, of_piece + piece.count);
    }
    const RopeRows& rope = *plan.ranks().rope();
    kernels.dot_turned(x.runs.data(), pieces, dim, q, a.queries.stride[1], group, softmax_scale,
                       {x.rank.data(), rope.cosine.data(), rope.sine.data()}, x.scores.data(), stride);
  } else {
    kernels.dot(x.runs.data(), pieces, dim, q, a.queries.stride[1], group, softmax_scale, x.scores.data(), stride);
  }
  bool any_seen = (a.window <= 0 && !a.masks) || apply_window(a, task, tokens, group, x, stride);
  if (a.bias && any_seen) any_seen = apply_bias(a, task, group, x, stride);
  if (a.logits.out) keep_logits(a, task, x, stride);
  for (int g = 0; g < group; ++g) {
    float* s = x.scores.data() + g * stride;
    const float maximum = any_seen ? kernels.max(s, tokens) : minus_infinity;
    partials.maximum(task.partial + g) = maximum;
    if (any_seen) {  // a maximum of -inf: all scores are -inf or NaN, and a NaN must reach the output
      partials.total(task.partial + g) = kernels.exp_sum(s, tokens, maximum > minus_infinity ? maximum : 0.f);
    } else {
      partials.total(task.partial + g) = 0;
      std::fill_n(s, tokens, 0.f);
    }
    std::memset(partials.values(task.partial + g), 0, dim * sizeof(float));
    if (!a.mass) continue;
    float* mass = &a.mass(task.row, head + g, 0);
    for (const Piece& piece : x.pieces) {
      std::memcpy(mass + std::int64_t{piece.page} * kv.page_size + piece.begin, s, piece.count * sizeof(float));
      s += piece.count;
    }
  }
  if (any_seen)
    kernels.accumulate(x.runs.data() + pieces, pieces, dim, x.scores.data(), stride, group,
                       partials.values(task.partial), partials.stride);
}

// Merges a query head's chunks to its output. Returns the log-sum-exp.
float merge(const AttendArgs& a, int row, int query_head, std::int64_t partial, int chunks, int group,
            const Partials& partials) {
  const RowKernels& kernels = row_kernels();
  const int dim = a.kv.head_dim;
  float maximum = minus_infinity;
  for (int c = 0; c < chunks; ++c) maximum = std::max(maximum, partials.maximum(partial + std::int64_t{c} * group));
  float* out = &a.out(row, query_head, 0);
  std::memset(out, 0, dim * sizeof(float));
  float total = 0;
  for (int c = 0; c < chunks; ++c) {
    const std::int64_t i = partial + std::int64_t{c} * group;
    if (partials.total(i) == 0) continue;
    const float weight = std::exp(partials.maximum(i) - maximum);
    total += weight * partials.total(i);
    kernels.add_scaled(partials.values(i), dim, weight, out);
  }
  if (total != 0) kernels.scale(out, dim, 1.f / total);
  const float lse = total != 0 ? maximum + std::log(total) : minus_infinity;
  if (a.lse) a.lse(row, query_head) = lse;
  return lse;
}

// Turns the chunks' weights into probabilities and zeroes every place that was not attended.
void finish_mass(const AttendArgs& a, const AttendPlan& plan, int row, int head, int query_head, float lse,
                 std::int64_t partial, int group, const Partials& partials) {
  thread_local std::vector<Piece> pieces;
  float* mass = &a.mass(row, query_head, 0);
  std::int64_t done = 0;
  for (int chunk = 0; chunk < plan.chunks(row, head); ++chunk) {
    pieces.clear();
    plan.pieces(a.kv, row, head, chunk, std::numeric_limits<int>::max(), pieces);
    const std::int64_t of_chunk = partial + std::int64_t{chunk} * group;
    const float maximum = partials.maximum(of_chunk);
    const bool seen = lse != minus_infinity && partials.total(of_chunk) != 0;
    const float weight = seen ? std::exp(maximum - lse) : 0.f;
    for (const Piece& piece : pieces) {
      const std::int64_t begin = std::int64_t{piece.page} * a.kv.page_size + piece.begin;
      std::fill(mass + done, mass + begin, 0.f);
      done = begin + piece.count;
      if (seen)
        row_kernels().scale(mass + begin, piece.count, weight);
      else
        std::fill(mass + begin, mass + done, 0.f);
    }
  }
  std::fill(mass + done, mass + a.mass.extent[2], 0.f);
}

}  // namespace

void attend(const AttendArgs& a, Workspace& w, Stream s) {
  const PagedKv& kv = a.kv;
  check_view(kv, "attend");
  const int query_heads = static_cast<int>(a.queries.extent[1]), group = query_heads / kv.kv_heads;
  check(a, group);
  if (s.device() == Device::cuda) return on_cuda<attend>(a, w, s);
  check_tables(kv, "attend");
  if (a.mass) check_scores(kv, a.mass, "mass", "attend", s);
  if (a.logits.out && a.logits.out.extent[2] < longest(kv))
    fail(Errc::internal, "attend", "got room for the logits of too few tokens");
  if (a.bias && a.bias.extent[2] < longest(kv))
    fail(Errc::internal, "attend",
         "got a bias of " + std::to_string(a.bias.extent[2]) + " tokens, wanted at least " +
             std::to_string(longest(kv)) + ", those of the longest head");
  thread_local AttendPlan plan_of_thread;
  AttendPlan& plan = plan_of_thread;
  plan.fill(a, group);
  const int tasks = static_cast<int>(plan.tasks().size()), heads = kv.rows * query_heads;
  const std::int64_t stride = kv.head_dim + row_pad;
  auto scratch = take_scratch<float>(w, "attend", {std::max(tasks, 1), group, stride});
  const Partials partials{scratch.data, stride};
  const float scale = a.softmax_scale > 0 ? a.softmax_scale : 1.f / std::sqrt(static_cast<float>(kv.head_dim));

  // A thread takes a few chunks in a row, so that the keys that a chunk prefetches are mostly its own.
  const int block = std::clamp(tasks / (4 * omp_get_max_threads()), 1, 8);
#pragma omp parallel if (tasks > 1)
  {
#pragma omp for schedule(dynamic, block)
    for (int i = 0; i < tasks; ++i) attend_chunk(a, plan, i, group, scale, partials);
#pragma omp for schedule(static)
    for (int i = 0; i < heads; ++i) {
      const int row = i / query_heads, query_head = i % query_heads, head = query_head / group;
      const std::int64_t partial = std::int64_t{plan.first_task(row, head)} * group + query_head % group;
      const float lse = merge(a, row, query_head, partial, plan.chunks(row, head), group, partials);
      if (a.mass) finish_mass(a, plan, row, head, query_head, lse, partial, group, partials);
    }
  }
  if (a.mass_into.column >= 0) add_mass(a.mass, a.mass_into.rule, {&a.kv, a.mass_into.column}, s);
}

}  // namespace kvlab::ops
