#include "engine/projection.hpp"

#include <kvlab/ops.hpp>

#include <algorithm>

#include "ops/score/abs_sums.hpp"

namespace kvlab {
namespace {

constexpr std::int64_t block = 2048;  // tokens of a product

}  // namespace

std::int64_t Projection::scratch_bytes(const Shape& s, int hidden) {
  const std::int64_t values = std::int64_t{s.kv_heads} * s.max_pages() * s.page_size * s.head_dim;
  return (values + block * hidden) * static_cast<std::int64_t>(sizeof(float));
}

void Projection::norms(const LayerKv& kv, Scores out, Stream s) const {
  const std::int64_t dim = kv.pages.head_dim, hidden = executor_.model().config.hidden,
                     longest = std::min<std::int64_t>(kv.max_length, out.extent[2]);
  const int heads = kv.shape->query_heads, group = kv.shape->group();
  const auto values = kv.scratch<float>("values", {1, kv.kv_heads(), longest, dim});
  const auto y = kv.scratch<float>("projected values", {std::min(block, longest), hidden});
  PagedKv one = kv.pages;
  one.rows = 1;
  for (int row = 0; row < kv.rows(); ++row, ++one.slots) {
    ops::read_rows({&one, KvSide::value}, values, s);
    const Scores to{out.data + row * out.stride[0], {1, out.extent[1], out.extent[2]}, out.stride};
    for (int h = 0; h < heads; ++h)
      for (std::int64_t first = 0; first < longest; first += block) {
        const std::int64_t count = std::min(block, longest - first);
        executor_.project_output(kv.layer, h, &values(0, h / group, first, 0), count, y.data);
        ops::add_abs_sums(one, h / group, static_cast<int>(first),
                          View<const float, 2>{y.data, {count, hidden}, {hidden, 1}}, 1 / static_cast<float>(group),
                          h % group == 0, to, s);
      }
  }
}

}  // namespace kvlab
