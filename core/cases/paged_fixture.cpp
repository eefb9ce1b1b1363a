#include "cases/paged_fixture.hpp"

#include <numeric>
#include <utility>

namespace kvlab::cases {

std::vector<float> randoms(std::int64_t count) {
  std::minstd_rand g(2);
  std::vector<float> v(static_cast<std::size_t>(count));
  for (float& x : v) x = static_cast<float>(g()) * 0x1p-30f - 1.f;
  return v;
}

const std::vector<float>& row_pool() {
  static const std::vector<float> pool = [] {
    std::mt19937 rng(5);
    std::normal_distribution<float> normal;
    std::vector<float> v(1021 * widest_row);
    for (float& x : v) x = normal(rng);
    return v;
  }();
  return pool;
}

std::vector<float> normals(std::int64_t count, unsigned seed) {
  const std::vector<float>& pool = row_pool();
  std::vector<float> v(static_cast<std::size_t>(count));
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < count; ++i)
    v[static_cast<std::size_t>(i)] =
        pool[((static_cast<std::uint32_t>(i) + 7919 * seed) * 2654435761u >> 8) % pool.size()];
  return v;
}

LengthsOnly::LengthsOnly(int rows, int kv_heads, int page_size, std::vector<std::int32_t> tokens)
    : length_(std::move(tokens)),
      slots_(static_cast<std::size_t>(rows)),
      rows_(rows),
      kv_heads_(kv_heads),
      page_size_(page_size) {
  std::iota(slots_.begin(), slots_.end(), 0);
  const int most = *std::max_element(length_.begin(), length_.end());
  table_.resize(length_.size() * static_cast<std::size_t>(std::max(1, (most + page_size - 1) / page_size)));
}

PagedKv LengthsOnly::view() const {
  PagedKv kv;
  kv.base = const_cast<std::byte*>(frame_.data());
  kv.layouts = &layout_;
  const auto pages = static_cast<std::int64_t>(table_.size()) / (std::int64_t{rows_} * kv_heads_);
  kv.table = View<const PageEntry, 3>::dense(table_.data(), {rows_, kv_heads_, pages});
  kv.length = View<const std::int32_t, 2>::dense(length_.data(), {rows_, kv_heads_});
  kv.slots = slots_.data();
  kv.rows = rows_, kv.kv_heads = kv_heads_, kv.head_dim = 64, kv.page_size = page_size_;
  return kv;
}

}  // namespace kvlab::cases
