#include <fmt/format.h>

#include <cstring>
#include <random>

#include "base/buffer.hpp"
#include "bench/cases.hpp"
#include "ops/attend.hpp"
#include "ops/paged.hpp"

namespace kvlab::bench {
namespace {

constexpr int layers = 30, query_heads = 9, kv_heads = 3, head_dim = 64, page_size = 16;

// Scratch that is used again by the next run.
class BenchWorkspace final : public Workspace {
 public:
  void* scratch(const char*, std::size_t bytes) override {
    if (next_ == blocks_.size()) blocks_.emplace_back();
    blocks_[next_].reserve(bytes);
    return blocks_[next_++].as<>();
  }
  void* state(const char*, std::size_t, int) override { return nullptr; }
  void reset() { next_ = 0; }

 private:
  std::vector<Buffer> blocks_;
  std::size_t next_ = 0;
};

std::vector<float> randoms(std::int64_t count) {
  std::minstd_rand g(2);
  std::vector<float> v(static_cast<std::size_t>(count));
  for (float& x : v) x = static_cast<float>(g()) * 0x1p-30f - 1.f;
  return v;
}

// One sequence of `tokens` tokens in bf16 pages, all layers; the pages of a head lie in shuffled order.
class Pages {
 public:
  explicit Pages(int tokens)
      : pages_(std::max(1, (tokens + page_size - 1) / page_size)),
        layout_(ops::make_layout(DType::bf16, {}, page_size, head_dim, 0)),
        frames_(static_cast<std::size_t>(layout_.bytes) * static_cast<std::size_t>(pages_ * kv_heads * layers)),
        entries_(static_cast<std::size_t>(pages_ * kv_heads * layers)),
        length_(kv_heads, tokens) {
    std::vector<std::int32_t> frame(entries_.size());
    for (std::size_t i = 0; i < frame.size(); ++i)
      frame[i] = static_cast<std::int32_t>(static_cast<std::int64_t>(i) * (layout_.bytes / granule_bytes));
    std::shuffle(frame.begin(), frame.end(), std::minstd_rand(3));
    const auto x = randoms(64 * head_dim);
#pragma omp parallel for schedule(static)
    for (std::size_t i = 0; i < frame.size(); ++i) {
      const int page = static_cast<int>(i % static_cast<std::size_t>(pages_));
      const int count = std::min(page_size, tokens - page * page_size);
      entries_[i] = {frame[i], static_cast<std::uint16_t>(count), 0, 0};
      std::byte* to = frames_.as<>() + std::int64_t{frame[i]} * granule_bytes;
      std::memset(to, 0, static_cast<std::size_t>(layout_.bytes));
      for (int t = 0; t < count; ++t) {
        const float* row = x.data() + static_cast<std::int64_t>((i + static_cast<std::size_t>(t)) % 64) * head_dim;
        ops::write_token(to, layout_, t, row, row, page * page_size + t);
      }
    }
  }

  PagedKv layer(int l) const {
    PagedKv kv;
    kv.base = frames_.as<>();
    kv.layouts = &layout_;
    kv.table =
        View<const PageEntry, 3>::dense(entries_.data() + std::int64_t{l} * kv_heads * pages_, {1, kv_heads, pages_});
    kv.length = View<const std::int32_t, 2>::dense(length_.data(), {1, kv_heads});
    kv.slots = &slot_;
    kv.rows = 1;
    kv.kv_heads = kv_heads;
    kv.head_dim = head_dim;
    kv.page_size = page_size;
    return kv;
  }

 private:
  int pages_;
  PageLayout layout_;
  Buffer frames_;
  std::vector<PageEntry> entries_;
  std::vector<std::int32_t> length_;
  std::int32_t slot_ = 0;
};

}  // namespace

std::vector<Line> attend_cases() {
  std::vector<Line> lines;
  for (const int depth : {2048, 8192}) {
    const Pages pages(depth);
    const auto q = randoms(query_heads * head_dim);
    std::vector<float> out(q.size());
    const std::int32_t last = depth - 1;
    BenchWorkspace w;
    const Times t = time_runs(10, [&] {
      for (int l = 0; l < layers; ++l) {
        ops::AttendArgs a;
        a.kv = pages.layer(l);
        a.queries = View<const float, 3>::dense(q.data(), {1, query_heads, head_dim});
        a.last = &last;
        a.out = View<float, 3>::dense(out.data(), {1, query_heads, head_dim});
        ops::attend(a, w, Stream::cpu());
        w.reset();
      }
    });
    Line l{"attend", fmt::format("bf16 9/3 heads of 64, depth {}", depth), "", t.median / layers, t.best / layers};
    l.bytes = 2. * kv_heads * head_dim * 2 * depth;
    l.flops = 4. * query_heads * head_dim * depth;
    l.reads = true;
    lines.push_back(l);
  }
  return lines;
}

std::vector<Line> prefill_attention_cases() {
  std::vector<Line> lines;
  for (const std::int64_t tokens : {2048, 8192})
    for (const bool mass : {false, true}) {
      const Pages empty(0);
      const auto q = randoms(tokens * query_heads * head_dim), k = randoms(tokens * kv_heads * head_dim);
      std::vector<float> out(q.size()), sums(static_cast<std::size_t>(query_heads * tokens));
      ops::PrefillArgs a;
      a.kv = empty.layer(0);
      a.queries = View<const float, 3>::dense(q.data(), {tokens, query_heads, head_dim});
      a.keys = a.values = View<const float, 3>::dense(k.data(), {tokens, kv_heads, head_dim});
      a.out = View<float, 3>::dense(out.data(), {tokens, query_heads, head_dim});
      if (mass) a.mass = View<float, 2>::dense(sums.data(), {query_heads, tokens});
      BenchWorkspace w;
      const Times t = time_runs(5, [&] {
        ops::prefill_attention(a, w, Stream::cpu());
        w.reset();
      });
      Line l{"prefill_attention", fmt::format("9/3 heads of 64, {} tokens{}", tokens, mass ? ", mass" : ""), "",
             t.median, t.best};
      l.flops = (mass ? 6. : 4.) * query_heads * head_dim * 0.5 * static_cast<double>(tokens * (tokens + 1));
      l.bytes = 4. * static_cast<double>(tokens) * head_dim * (2 * query_heads + 2 * kv_heads);
      lines.push_back(l);
    }
  return lines;
}

}  // namespace kvlab::bench
