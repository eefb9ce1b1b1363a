#include "ops/attend.hpp"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "base/backend.hpp"
#include "ops/check.hpp"
#include "ops/token_rows.hpp"

namespace kvlab::ops {
namespace {

constexpr int chunk_tokens = 256;
constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

// Pages that one head attends to.
struct Span {
  const std::int32_t* list = nullptr;
  int count = 0;
};

struct Task {
  int row, head, chunk;
  std::int64_t partial;  // index of its first query head's partial
};

// Per call, kept by the calling thread: nothing is allocated once it has grown.
struct Plan {
  std::vector<std::int32_t> lists;
  std::vector<std::int64_t> list_begin;
  std::vector<Span> spans;
  std::vector<std::int64_t> first_task;  // [row, kv_head] + 1
  std::vector<Task> tasks;
  HeadRanks ranks;
};

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
  }
  if (a.window > 0 && !a.last) fail(Errc::internal, op, "got a window without query positions, wanted `last`");
  if (a.pages && (a.pages->index.extent[0] < kv.rows || a.pages->index.extent[1] < kv.kv_heads ||
                  a.pages->count.extent[0] < kv.rows || a.pages->count.extent[1] < kv.kv_heads))
    fail(Errc::internal, op, "got too small a page list, wanted [row, kv_head]");
}

void plan_pages(const AttendArgs& a, Plan& plan) {
  const char* op = "attend";
  const PagedKv& kv = a.kv;
  plan.spans.clear();
  plan.lists.clear();
  plan.list_begin.clear();
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int pages = kv.pages(r, h);
      int count = pages;
      plan.list_begin.push_back(static_cast<std::int64_t>(plan.lists.size()));
      if (a.pages) {
        count = a.pages->count(r, h);
        if (count < 0 || count > a.pages->index.extent[2] || count > pages)
          fail(Errc::internal, op,
               "got a list of " + std::to_string(count) + " pages, wanted at most " + std::to_string(pages));
        for (int i = 0; i < count; ++i) {
          const int page = a.pages->index(r, h, i);
          if (page < 0 || page >= pages || (i > 0 && page <= plan.lists.back()))
            fail(Errc::internal, op,
                 "got page " + std::to_string(page) + " of " + std::to_string(pages) +
                     ", wanted ascending pages of the head");
          plan.lists.push_back(page);
        }
      }
      plan.spans.push_back({nullptr, count});
      for (int i = 0; i < count; ++i) check_page(kv, r, h, a.pages ? plan.lists[plan.list_begin.back() + i] : i, op);
    }
  if (a.pages)
    for (std::size_t i = 0; i < plan.spans.size(); ++i) plan.spans[i].list = plan.lists.data() + plan.list_begin[i];
}

// Partial of one query head: maximum, sum, then head_dim weighted values.
struct Partials {
  float* data;
  std::int64_t stride;
  float& maximum(std::int64_t i) const { return data[i * stride]; }
  float& total(std::int64_t i) const { return data[i * stride + 1]; }
  float* values(std::int64_t i) const { return data + i * stride + row_pad; }
};

// Pages of one chunk: list[i], or first + i.
struct Pages {
  const std::int32_t* list;
  int first, count;
  int operator[](int i) const { return list ? list[i] : first + i; }
};

Pages pages_of(const PagedKv& kv, const Plan& plan, const Task& task, int chunk_pages) {
  const Span& span = plan.spans[std::size_t(task.row) * kv.kv_heads + task.head];
  const int first = task.chunk * chunk_pages;
  return {span.list ? span.list + first : nullptr, first, std::min(chunk_pages, span.count - first)};
}

int tokens_of(const PagedKv& kv, const Task& task, int page) {
  return std::min(kv.page_size, kv.tokens(task.row, task.head) - page * kv.page_size);
}

void add_runs(const PagedKv& kv, const Task& task, const Pages& pages, KvSide side, int most,
              std::vector<RowRun>& runs) {
  for (int i = 0; i < std::min(pages.count, most); ++i)
    runs.push_back(page_run(kv, kv.entry(task.row, task.head, pages[i]), side, tokens_of(kv, task, pages[i])));
}

struct Chunk {
  std::vector<RowRun> runs;  // keys, values, then the first keys of the chunk to come
  std::vector<float> scores;
  std::vector<std::int32_t> position, rank;
};

// Hides what the window leaves out. Returns whether a token is left.
bool apply_window(const AttendArgs& a, const Task& task, const Pages& pages, int tokens, int group, Chunk& x,
                  std::int64_t stride) {
  x.position.clear();
  for (int i = 0; i < pages.count; ++i) {
    const PageEntry& e = a.kv.entry(task.row, task.head, pages[i]);
    const auto* p = reinterpret_cast<const std::int32_t*>(a.kv.frame(e) + a.kv.layout(e).positions);
    x.position.insert(x.position.end(), p, p + tokens_of(a.kv, task, pages[i]));
  }
  const int oldest = a.last[task.row] - a.window;
  bool any = false;
  for (int t = 0; t < tokens; ++t) {
    any |= x.position[t] > oldest;
    for (int g = 0; x.position[t] <= oldest && g < group; ++g) x.scores[g * stride + t] = minus_infinity;
  }
  return any;
}

// Probabilities of one chunk for all query heads of the group, relative to the chunk's maximum, then its values.
void attend_chunk(const AttendArgs& a, const Plan& plan, int index, int chunk_pages, int group, float softmax_scale,
                  Partials partials) {
  thread_local Chunk x;
  const PagedKv& kv = a.kv;
  const RowKernels& kernels = row_kernels();
  const Task& task = plan.tasks[index];
  const int dim = kv.head_dim, head = task.head * group;
  const Pages pages = pages_of(kv, plan, task, chunk_pages);
  x.runs.clear();
  add_runs(kv, task, pages, KvSide::key, pages.count, x.runs);
  add_runs(kv, task, pages, KvSide::value, pages.count, x.runs);
  if (index + 1 < static_cast<int>(plan.tasks.size())) {
    const Task& next = plan.tasks[index + 1];
    add_runs(kv, next, pages_of(kv, plan, next, chunk_pages), KvSide::key, run_ahead, x.runs);
  }
  x.runs.resize(2 * pages.count + run_ahead);

  int tokens = 0;
  for (int i = 0; i < pages.count; ++i) tokens += x.runs[i].count;
  const std::int64_t stride = padded(tokens);
  if (x.scores.size() < std::size_t(stride) * group) x.scores.resize(std::size_t(stride) * group);
  const float* q = &a.queries(task.row, head, 0);
  if (const std::int32_t* rank = plan.ranks.of(task.row, task.head)) {
    const std::int32_t* of_chunk = rank + std::int64_t{pages.first} * kv.page_size;
    if (pages.list) {
      x.rank.clear();
      for (int i = 0; i < pages.count; ++i) {
        const std::int32_t* of_page = rank + std::int64_t{pages[i]} * kv.page_size;
        x.rank.insert(x.rank.end(), of_page, of_page + x.runs[i].count);
      }
      of_chunk = x.rank.data();
    }
    const RopeRows& rope = *plan.ranks.rope();
    kernels.dot_turned(x.runs.data(), pages.count, dim, q, a.queries.stride[1], group, softmax_scale,
                       {of_chunk, rope.cosine.data(), rope.sine.data()}, x.scores.data(), stride);
  } else {
    kernels.dot(x.runs.data(), pages.count, dim, q, a.queries.stride[1], group, softmax_scale, x.scores.data(), stride);
  }
  const bool any_seen = a.window <= 0 || apply_window(a, task, pages, tokens, group, x, stride);
  for (int g = 0; g < group; ++g) {
    float* s = x.scores.data() + g * stride;
    const float maximum = any_seen ? kernels.max(s, tokens) : minus_infinity;
    partials.maximum(task.partial + g) = maximum;
    if (maximum > minus_infinity) {
      partials.total(task.partial + g) = kernels.exp_sum(s, tokens, maximum);
    } else {
      partials.total(task.partial + g) = 0;
      std::fill_n(s, tokens, 0.f);
    }
    std::memset(partials.values(task.partial + g), 0, dim * sizeof(float));
    if (!a.mass) continue;
    float* mass = &a.mass(task.row, head + g, 0);
    for (int i = 0, t = 0; i < pages.count; t += x.runs[i++].count)
      std::memcpy(mass + std::int64_t{pages[i]} * kv.page_size, s + t, x.runs[i].count * sizeof(float));
  }
  if (any_seen)
    kernels.accumulate(x.runs.data() + pages.count, pages.count, dim, x.scores.data(), stride, group,
                       partials.values(task.partial), partials.stride);
}

// Returns the log-sum-exp.
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
    if (!(partials.total(i) > 0)) continue;
    const float weight = std::exp(partials.maximum(i) - maximum);
    total += weight * partials.total(i);
    kernels.add_scaled(partials.values(i), dim, weight, out);
  }
  if (total > 0) kernels.scale(out, dim, 1.f / total);
  const float lse = total > 0 ? maximum + std::log(total) : minus_infinity;
  if (a.lse) a.lse(row, query_head) = lse;
  return lse;
}

// The chunks' weights become probabilities; everything that was not attended to becomes 0.
void finish_mass(const AttendArgs& a, const Span& span, int row, int head, int query_head, float lse,
                 std::int64_t partial, int chunk_pages, int group, const Partials& partials) {
  const int extent = static_cast<int>(a.mass.extent[2]), tokens = a.kv.tokens(row, head), page_size = a.kv.page_size;
  float* mass = &a.mass(row, query_head, 0);
  int done = 0;
  for (int i = 0; i < span.count; ++i) {
    const int begin = (span.list ? span.list[i] : i) * page_size, end = std::min(begin + page_size, tokens);
    std::fill(mass + done, mass + begin, 0.f);
    const float maximum = partials.maximum(partial + std::int64_t{i / chunk_pages} * group);
    if (lse > minus_infinity && maximum > minus_infinity)
      row_kernels().scale(mass + begin, end - begin, std::exp(maximum - lse));
    else
      std::fill(mass + begin, mass + end, 0.f);
    done = end;
  }
  std::fill(mass + done, mass + extent, 0.f);
}

}  // namespace

void attend(const AttendArgs& a, Workspace& w, Stream s) {
  const PagedKv& kv = a.kv;
  check_view(kv, "attend");
  const int query_heads = static_cast<int>(a.queries.extent[1]), group = query_heads / kv.kv_heads;
  check(a, group);
  if (s.device() == Device::cuda) return cuda_op(&CudaOps::attend, "attend")(a, s.handle());
  check_tables(kv, "attend");
  if (a.mass) check_scores(kv, a.mass, "mass", "attend", s);
  thread_local Plan plan_of_thread;
  Plan& plan = plan_of_thread;
  plan_pages(a, plan);
  plan.ranks.fill(kv);
  const int chunk_pages = std::max(1, chunk_tokens / kv.page_size);
  plan.tasks.clear();
  plan.first_task.assign(1, 0);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int count = plan.spans[std::size_t(r) * kv.kv_heads + h].count;
      for (int c = 0; c * chunk_pages < count; ++c)
        plan.tasks.push_back({r, h, c, static_cast<std::int64_t>(plan.tasks.size()) * group});
      plan.first_task.push_back(static_cast<std::int64_t>(plan.tasks.size()));
    }
  const int tasks = static_cast<int>(plan.tasks.size()), heads = kv.rows * query_heads;
  const std::int64_t stride = kv.head_dim + row_pad;
  auto scratch = take_scratch<float>(w, "attend", {std::max(tasks, 1), group, stride});
  const Partials partials{scratch.data, stride};
  const float scale = a.softmax_scale > 0 ? a.softmax_scale : 1.f / std::sqrt(static_cast<float>(kv.head_dim));

  // Threads take a few chunks in a row, so that the keys to come which a chunk asks for are mostly their own.
  const int block = std::clamp(tasks / (4 * omp_get_max_threads()), 1, 8);
#pragma omp parallel if (tasks > 1)
  {
#pragma omp for schedule(dynamic, block)
    for (int i = 0; i < tasks; ++i) attend_chunk(a, plan, i, chunk_pages, group, scale, partials);
#pragma omp for schedule(static)
    for (int i = 0; i < heads; ++i) {
      const int row = i / query_heads, query_head = i % query_heads, head = query_head / group;
      const std::size_t at = std::size_t(row) * kv.kv_heads + head;
      const std::int64_t first = plan.first_task[at];
      const int chunks = static_cast<int>(plan.first_task[at + 1] - first);
      const std::int64_t partial = first * group + query_head % group;
      const float lse = merge(a, row, query_head, partial, chunks, group, partials);
      if (a.mass) finish_mass(a, plan.spans[at], row, head, query_head, lse, partial, chunk_pages, group, partials);
    }
  }
}

}  // namespace kvlab::ops
