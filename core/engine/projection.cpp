#include "engine/projection.hpp"

#include <kvlab/ops.hpp>

#include <algorithm>

#include "base/stream_memory.hpp"
#include "ops/score/abs_sums.hpp"

namespace kvlab {
namespace {

constexpr std::int64_t block = 256;  // tokens of a product

}  // namespace

std::int64_t Projection::scratch_bytes(const Shape& s, int hidden) {
  const std::int64_t values = std::int64_t{s.kv_heads} * s.max_pages() * s.page_size * s.head_dim,
                     products = block * (std::int64_t{s.query_heads} * s.head_dim + hidden);
  return (values + products) * static_cast<std::int64_t>(sizeof(float));
}

// The product takes rows of all query heads, so the rows are zeros but for one head.
void Projection::norms(const LayerKv& kv, Scores out, Stream s) const {
  const std::int64_t heads = kv.shape->query_heads, dim = kv.pages.head_dim, group = kv.shape->group(),
                     hidden = executor_.model().config.hidden,
                     longest = std::min<std::int64_t>(kv.max_length, out.extent[2]);
  const auto values = kv.scratch<float>("values", {1, kv.kv_heads(), longest, dim});
  const auto x = kv.scratch<float>("values of a head", {block, heads * dim});
  const auto y = kv.scratch<float>("projected values", {block, hidden});
  PagedKv one = kv.pages;
  one.rows = 1;
  for (int row = 0; row < kv.rows(); ++row, ++one.slots) {
    ops::read_rows({&one, KvSide::value}, values, s);
    const Scores to{out.data + row * out.stride[0], {1, out.extent[1], out.extent[2]}, out.stride};
    for (int h = 0; h < heads; ++h) {
      zero_memory(x.data, static_cast<std::size_t>(block * heads * dim) * sizeof(float), s);
      const int kv_head = h / static_cast<int>(group);
      for (std::int64_t first = 0; first < longest; first += block) {
        const std::int64_t count = std::min(block, longest - first);
        ops::copy({x.data + h * dim, {1, count, dim}, {0, heads * dim, 1}},
                  View<const float, 3>{&values(0, kv_head, first, 0), {1, count, dim}, {0, dim, 1}}, s);
        executor_.project_output(kv.layer, x.data, count, y.data);
        ops::add_abs_sums(one, kv_head, static_cast<int>(first),
                          View<const float, 2>{y.data, {count, hidden}, {hidden, 1}}, 1 / static_cast<float>(group),
                          h % group == 0, to, s);
      }
    }
  }
}

}  // namespace kvlab
