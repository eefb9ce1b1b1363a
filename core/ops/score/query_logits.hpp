// The products of a KV head's keys with many queries, on the CPU.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "ops/page/paged.hpp"
#include "ops/page/token_rows.hpp"

namespace kvlab::ops {

struct QueryLogits {
  TokenRows rows;
  std::vector<float> panel, scores;  // [head_dim, panel_width], [query head, query, stride]
  std::vector<std::int32_t> position;
  std::int64_t stride = 0;  // the last panel may reach past the tokens

  // scores[query head, i, t] = q_i . k_t for the queries [query head, i, head_dim] of a KV head. Keys are read and
  // packed once.
  void fill(const PagedKv& kv, int row, int head, const View<const float, 3>& queries, const HeadRanks& ranks) {
    constexpr int block_tokens = 128;  // decoded and packed at once
    const RowKernels& kernels = row_kernels();
    const int pages = kv.pages(row, head), group = static_cast<int>(queries.extent[0]), tokens = kv.tokens(row, head);
    const int window = static_cast<int>(queries.extent[1]), block = std::max(1, block_tokens / kv.page_size);
    stride = tokens + panel_width;
    scores.resize(static_cast<std::size_t>(stride * window * group));
    position.resize(static_cast<std::size_t>(tokens));
    panel.resize(std::size_t(kv.head_dim) * panel_width);
    int place = 0;
    for (int p = 0; p < pages; p += block) {
      rows.gather(kv, row, head, KvSide::key, nullptr, p, std::min(block, pages - p));
      const std::int32_t* rank = ranks.of(row, head);
      const float* keys = rank ? rows.rotate(kv, rank, *ranks.rope()) : rows.decode(kv.head_dim);
      for (int t = 0; t < rows.count(); ++t) position[place + t] = rows.position(t);
      for (int t = 0; t < rows.count(); t += panel_width) {
        const int count = std::min(panel_width, rows.count() - t);
        kernels.pack_panel(keys + std::int64_t{t} * kv.head_dim, count, kv.head_dim, panel.data());
        for (int g = 0; g < group; ++g)
          kernels.panel_dot(panel.data(), kv.head_dim, &queries(g, 0, 0), queries.stride[1], window,
                            scores.data() + g * window * stride + place + t, stride);
      }
      place += rows.count();
    }
  }
  float* of(int member, int query, int window) { return scores.data() + (member * window + query) * stride; }
};

}  // namespace kvlab::ops
