// Rows of keys as they were before RoPE, and back.
#include <kvlab/rewrite.hpp>

#include <algorithm>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/page/paged.hpp"
#include "ops/page/rope_cache.hpp"
#include "ops/page/row_kernels.hpp"
#include "ops/score/channels.hpp"

namespace kvlab::ops {
namespace {

void turn_head(const PagedKv& kv, int row, int head, RopeTurn way, const View<float, 4>& rows, int first) {
  const int n = kv.tokens(row, head);
  if (n == 0) return;
  std::vector<std::int32_t> positions(static_cast<std::size_t>(n));
  token_positions(kv, row, head, n, positions.data());
  RopeTable table = kv.rope_table;
  if (way == RopeTurn::off) table.attention_scale = 1 / table.attention_scale;
  const auto angles = rope_rows(table, *std::max_element(positions.begin(), positions.end()) + 1);
  std::vector<float> back(static_cast<std::size_t>(angles->half()));
  for (int t = first; t < n; ++t) {
    const int position = positions[static_cast<std::size_t>(t)];
    const float* sine = angles->sine_of(position);
    if (way == RopeTurn::off) {
      std::transform(sine, sine + back.size(), back.begin(), [](float x) { return -x; });
      sine = back.data();
    }
    row_kernels().rotate(&rows(row, head, t, 0), angles->cosine_of(position), sine, kv.head_dim);
  }
}

}  // namespace

void turn_rows(const PagedKv& kv, RopeTurn way, View<float, 4> rows, Stream s, const RowRange& range) {
  const char* op = "turn_rows";
  resident_cache(&kv, op, s);
  check_rows(kv, rows, op, s);
  check_range(kv, range, op);
  if (kv.rope != RopeRegime::original)
    fail(Errc::unsupported, op, "got keys that RoPE turns by ranks, wanted the regime original: by text positions");
  if (!kv.rope_table.inv_freq || kv.rope_table.head_dim != kv.head_dim)
    fail(Errc::internal, op, "got no RoPE table, wanted the model's");
  if (s.device() == Device::cuda) return on_cuda<turn_rows>(kv, way, rows, s, range);
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) turn_head(kv, r, h, way, rows, range.first(r, h));
}

}  // namespace kvlab::ops
