#include "bench/fixture.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "bench/cases.hpp"
#include "ops/page/paged.hpp"

namespace kvlab::bench {

Pages::Pages(int tokens, int state_columns)
    : pages_(std::max(1, (tokens + page_size - 1) / page_size)),
      layout_(ops::make_layout(DType::bf16, {}, page_size, head_dim, state_columns)),
      frames_(static_cast<std::size_t>(layout_.bytes) * static_cast<std::size_t>(pages_ * kv_heads * layers)),
      entries_(static_cast<std::size_t>(pages_ * kv_heads * layers)),
      length_(kv_heads, tokens) {
  for (int i = 0; i < head_dim / 2; ++i) inv_freq_.push_back(std::pow(1e5f, -2.f * static_cast<float>(i) / head_dim));
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

PagedKv Pages::layer(int l) const {
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
  kv.rope_table = {inv_freq_.data(), head_dim, 1.f};
  return kv;
}

}  // namespace kvlab::bench
