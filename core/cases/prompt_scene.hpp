// The inputs of one attend_prompt call, in the host's memory and at a place.
#pragma once
#include <limits>
#include <numeric>

#include "base/buffer.hpp"
#include "cases/paged_fixture.hpp"
#include "cases/place.hpp"
#include "ops/attend/attend_prompt.hpp"

namespace kvlab::cases {

struct PromptShape {
  PagedOptions options;  // one row
  int group = 1, tokens = 1;
  std::vector<int> past = {0};  // [kv_head], cycled: tokens before the chunk
  int gap = 1;                  // between text positions of tokens before the chunk
  int window = 0;
  std::vector<PromptMask> masks;  // [kv_head], cycled; empty = none
  ops::PromptKernel kernel = ops::PromptKernel::own;
  bool half = false;  // the op reads f16 with the same values; the reference reads bf16
};

// Scratch full of NaN shows reads of unwritten entries.
class PoisonedScratch final : public Workspace {
 public:
  void* scratch(const char*, std::size_t bytes) override {
    blocks_.emplace_back(std::max<std::size_t>(bytes, 1));
    std::memset(blocks_.back().as<>(), 0xff, bytes);
    return blocks_.back().as<>();
  }
  void* state(const char*, std::size_t, int) override { return nullptr; }
  const void* constant(const char*, const void*, std::size_t) override { return nullptr; }

 private:
  std::vector<Buffer> blocks_;
};

struct PromptOutputs {
  std::vector<float> out, sums;  // NaN where nobody writes
};

struct PromptScene {
  PromptShape shape;
  PagedFixture cache;    // holds the chunk too
  std::vector<float> q;  // of the chunk; rounded to bf16 if the cache is

  explicit PromptScene(const PromptShape& s) : shape(s), cache(with_frames(s)) {
    for (int h = 0; h < kv_heads(); ++h)
      cache.fill_pooled(0, h, past(h) + s.tokens,
                        [&, n = past(h)](int t) { return t < n ? s.gap * t : s.gap * most_past() + t - n; });
    for (int h = 0; h < kv_heads() && !s.masks.empty(); ++h)
      masks_.push_back(s.masks[static_cast<std::size_t>(h) % s.masks.size()]);
    q = normals(std::int64_t{s.tokens} * heads() * dim(), 3);
    // Later tokens have larger queries, so their attention is sharper.
    const auto size = static_cast<float>(q.size());
#pragma omp parallel for schedule(static)
    for (std::size_t i = 0; i < q.size(); ++i) {
      q[i] *= 1 + static_cast<float>(i) / size;
      if (s.options.dtype == DType::bf16) q[i] = static_cast<float>(bf16(q[i]));
    }
  }
  PromptScene(const PromptScene&) = delete;

  int kv_heads() const { return shape.options.kv_heads; }
  int heads() const { return kv_heads() * shape.group; }
  int dim() const { return shape.options.head_dim; }
  int past(int head) const { return shape.past[static_cast<std::size_t>(head) % shape.past.size()]; }
  int most_past() const { return *std::max_element(shape.past.begin(), shape.past.end()); }
  int longest() const { return most_past() + shape.tokens; }  // tokens that the last query sees

  float largest_value() {
    float largest = 0;
    std::vector<float> rows;
    for (int h = 0; h < kv_heads(); ++h) {
      rows.resize(static_cast<std::size_t>((past(h) + shape.tokens) * dim()));
      ops::gather_rows(cache.view(), 0, h, KvSide::value, past(h) + shape.tokens, rows.data());
      for (const float x : rows) largest = std::max(largest, std::abs(x));
    }
    return largest;
  }

  // The CPU's arguments for tokens [begin, begin + count) of the chunk, whose earlier tokens are before that chunk.
  // They hold until the next call.
  ops::PromptArgs args(int begin, int count) {
    lengths_.clear(), keys_.clear(), values_.clear();
    for (int h = 0; h < kv_heads(); ++h) lengths_.push_back(past(h) + begin);
    for (auto* rows : {&keys_, &values_}) rows->resize(static_cast<std::size_t>(count * kv_heads() * dim()));
    ops::PromptArgs a;
    a.kv = cache.view();
    const PageLayout& l = a.kv.layouts[0];
    for (int t = 0; t < count; ++t)
      for (int h = 0; h < kv_heads(); ++h) {
        const int place = past(h) + begin + t;
        const PageEntry& e = cache.entry(0, h, place / l.page_size);
        const std::ptrdiff_t row = std::ptrdiff_t{t * kv_heads() + h} * dim();
        ops::read_row(a.kv.frame(e), l, KvSide::key, place % l.page_size, keys_.data() + row);
        ops::read_row(a.kv.frame(e), l, KvSide::value, place % l.page_size, values_.data() + row);
      }
    a.kv.length = View<const std::int32_t, 2>::dense(lengths_.data(), {1, kv_heads()});
    const std::int64_t row = std::int64_t{heads()} * dim();
    a.queries = View<const float, 3>::dense(q.data() + begin * row, {count, heads(), dim()});
    a.keys = View<const float, 3>::dense(keys_.data(), {count, kv_heads(), dim()});
    a.values = View<const float, 3>::dense(values_.data(), {count, kv_heads(), dim()});
    a.first = shape.gap * most_past() + begin;
    a.window = shape.window;
    a.masks = masks_.empty() ? nullptr : masks_.data();
    return a;
  }
  ops::PromptArgs args() { return args(0, shape.tokens); }

  // The arguments at a place. On a GPU all rows share one slot's pages, and each has its own length, as an executor
  // gives them.
  ops::PromptArgs put(Place& place) {
    if (place.stream().device() == Device::cpu) {
      ops::PromptArgs a = args();
      a.kv = place.put(a.kv, cache.arena_bytes());
      a.queries = place.put(a.queries);
      a.keys = place.put(a.keys);
      a.values = place.put(a.values);
      if (a.masks) a.masks = place.put(masks_);
      return a;
    }
    ops::PromptArgs a;
    a.kv = place.put(cache.view(), cache.arena_bytes());
    a.kv.rows = shape.tokens;
    a.kv.table.extent[0] = shape.tokens, a.kv.table.stride[0] = 0;
    std::vector<std::int32_t> lengths, rows(static_cast<std::size_t>(shape.tokens));
    for (int t = 0; t < shape.tokens; ++t)
      for (int h = 0; h < kv_heads(); ++h) lengths.push_back(past(h) + t + 1);
    std::iota(rows.begin(), rows.end(), 0);
    a.kv.length = View<const std::int32_t, 2>::dense(place.put(lengths), {shape.tokens, kv_heads()});
    a.kv.slots = place.put(rows);
    a.queries = place.put(View<const float, 3>::dense(q.data(), {shape.tokens, heads(), dim()}));
    a.longest = longest();
    a.first = shape.gap * most_past();
    if (!masks_.empty()) a.masks = place.put(masks_);
    a.kernel = shape.kernel;
    return a;
  }

  // What run(arguments) writes for these arguments of args().
  template <class Run>
  PromptOutputs outputs(ops::PromptArgs a, const Run& run) const {
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    const auto extent = a.queries.extent;
    const std::int64_t begin = a.first - shape.gap * most_past(), places = most_past() + begin + extent[0];
    PromptOutputs o{std::vector<float>(static_cast<std::size_t>(extent[0] * extent[1] * extent[2]), nan),
                    std::vector<float>(static_cast<std::size_t>(extent[1] * places), nan)};
    a.out = View<float, 3>::dense(o.out.data(), extent);
    a.sums = View<float, 2>::dense(o.sums.data(), {extent[1], places});
    run(a);
    return o;
  }
  PromptOutputs reference(const ops::PromptArgs& a) const { return outputs(a, ops::attend_prompt_reference); }

 private:
  static PagedOptions with_frames(const PromptShape& s) {
    PagedOptions o = s.options;
    o.frames = 0;
    for (int h = 0; h < o.kv_heads; ++h) {
      const int pages =
          (s.past[static_cast<std::size_t>(h) % s.past.size()] + s.tokens + o.page_size - 1) / o.page_size;
      o.frames += pages;
      o.max_pages = std::max(o.max_pages, pages);
    }
    return o;
  }

  std::vector<PromptMask> masks_;
  std::vector<std::int32_t> lengths_;
  std::vector<float> keys_, values_;
};

}  // namespace kvlab::cases
