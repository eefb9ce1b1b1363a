// Measures page scores and selection on the GPU: one layer in Llama-3.1-8B's shape, all heads. An op runs over one copy
// of its input after the other, as the layers of a step follow each other. The copies make five times the L2 cache. A
// line has the time of one run.
#include <fmt/format.h>
#include <kvlab/ops.hpp>

#include <cmath>
#include <numeric>

#include "bench/cuda_timing.hpp"

namespace kvlab::bench {
namespace {

constexpr int query_heads = 32, kv_heads = 8, head_dim = 128;

constexpr double rotated_bytes = 300e6;

// Copies of the same content.
class Copies {
 public:
  template <class T>
  Copies(const CudaTimer& timer, const std::vector<T>& content)
      : count_(
            std::max(1, static_cast<int>(std::ceil(rotated_bytes / static_cast<double>(content.size() * sizeof(T)))))),
        bytes_(content.size() * sizeof(T)),
        memory_(bytes_ * static_cast<std::size_t>(count_)) {
    for (int c = 0; c < count_; ++c)
      cuda_backend()->runtime.copy(at<std::byte>(c), content.data(), bytes_, timer.handle());
    cuda_backend()->runtime.synchronize(timer.handle());
  }
  int count() const { return count_; }
  template <class T>
  T* at(int copy) const {
    return reinterpret_cast<T*>(memory_.as<std::byte>() + static_cast<std::size_t>(copy) * bytes_);
  }

 private:
  int count_;
  std::size_t bytes_;
  DeviceBuffer memory_;
};

// Tables of `rows` sequences of equal length, without pages: no op here reads one.
class Tables {
 public:
  Tables(const CudaTimer& timer, int rows, int tokens, int page_size)
      : rows_(rows), pages_((tokens + page_size - 1) / page_size), page_size_(page_size) {
    std::vector<std::int32_t> slots(static_cast<std::size_t>(rows));
    std::iota(slots.begin(), slots.end(), 0);
    slots_ = timer.put(slots);
    lengths_ = timer.put(std::vector<std::int32_t>(static_cast<std::size_t>(rows) * kv_heads, tokens));
    table_ =
        timer.put(std::vector<PageEntry>(static_cast<std::size_t>(rows) * kv_heads * static_cast<std::size_t>(pages_)));
  }
  PagedKv view() const {
    PagedKv kv;
    kv.base = table_->as<std::byte>();
    kv.layouts = &layout_;
    kv.table = View<const PageEntry, 3>::dense(table_->as<PageEntry>(), {rows_, kv_heads, pages_});
    kv.length = View<const std::int32_t, 2>::dense(lengths_->as<std::int32_t>(), {rows_, kv_heads});
    kv.slots = slots_->as<std::int32_t>();
    kv.rows = rows_, kv.kv_heads = kv_heads, kv.head_dim = head_dim, kv.page_size = page_size_;
    return kv;
  }
  int pages() const { return pages_; }

 private:
  int rows_, pages_, page_size_;
  PageLayout layout_;
  std::unique_ptr<DeviceBuffer> slots_, lengths_, table_;
};

// Room for the lists of the best `k` of every head, and the budgets that ask for them.
class Lists {
 public:
  Lists(const CudaTimer& timer, int rows, int k)
      : rows_(rows),
        k_(k),
        budgets_(timer.put(std::vector<std::int32_t>(static_cast<std::size_t>(rows) * kv_heads, k))),
        index_(static_cast<std::size_t>(rows) * kv_heads * static_cast<std::size_t>(k) * 4),
        count_(static_cast<std::size_t>(rows) * kv_heads * 4) {}
  View<const std::int32_t, 2> budgets() const {
    return View<const std::int32_t, 2>::dense(budgets_->as<std::int32_t>(), {rows_, kv_heads});
  }
  PageList list() const {
    PageList l;
    l.index = View<std::int32_t, 3>::dense(index_.as<std::int32_t>(), {rows_, kv_heads, k_});
    l.count = View<std::int32_t, 2>::dense(count_.as<std::int32_t>(), {rows_, kv_heads});
    return l;
  }

 private:
  int rows_, k_;
  std::unique_ptr<DeviceBuffer> budgets_;
  DeviceBuffer index_, count_;
};

Line fused(const CudaTimer& timer, int rows, int tokens, int page_size, int selected) {
  const Tables tables(timer, rows, tokens, page_size);
  const PagedKv kv = tables.view();
  const Lists lists(timer, rows, selected / page_size);
  const std::int64_t heads = std::int64_t{rows} * kv_heads, box = 2 * head_dim, boxes = heads * tables.pages();
  const auto queries = timer.put(randoms(std::int64_t{rows} * query_heads * head_dim));
  std::vector<bf16> data(static_cast<std::size_t>(boxes * box));
  const std::vector<float> random = randoms(1 << 16);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = bf16(random[(i * 2654435761u >> 7) & 0xffff]);
  const Copies copies(timer, data);
  const std::int64_t page_stride = box * 2, head_stride = page_stride * tables.pages();
  DeviceBuffer scores(static_cast<std::size_t>(boxes) * 4);
  const auto score_view = View<float, 3>::dense(scores.as<float>(), {rows, kv_heads, tables.pages()});
  const Times t = timer.time([&] {
    for (int c = 0; c < copies.count(); ++c) {
      const Summaries summaries{Summary::min_max,       DType::bf16, copies.at<std::byte>(c),
                                head_stride * kv_heads, head_stride, page_stride};
      ops::score_pages(View<const float, 3>::dense(queries->as<float>(), {rows, query_heads, head_dim}), kv, summaries,
                       GroupRule::max, 1.f, lists.budgets(), {}, score_view, lists.list(), timer.stream());
    }
  });
  Line l{"score",
         fmt::format("boxes, top {} of {} pages of {}, {} x {}, one of {}", selected / page_size, tables.pages(),
                     page_size, rows, tokens, copies.count()),
         "mma, fused top-k", t.median / copies.count(), t.best / copies.count()};
  l.bytes = static_cast<double>(boxes * page_stride);
  l.reads = true;
  return l;
}

}  // namespace

std::vector<Line> cuda_score_cases() {
  const CudaTimer timer;
  return {fused(timer, 40, 10240, 16, 1024), fused(timer, 40, 10240, 32, 1024), fused(timer, 8, 32768, 16, 1024),
          fused(timer, 1, 131072, 16, 1024)};
}

}  // namespace kvlab::bench
