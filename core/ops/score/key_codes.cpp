// Keys in 4 bits beside the cache, and their products with vectors.
#include "ops/score/key_codes.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/page/paged.hpp"
#include "ops/page/row_kernels.hpp"
#include "ops/score/newest_keys.hpp"

namespace kvlab::ops {
namespace {

void check_codes(const PagedKv& kv, const KeyCodes& c, const char* op, Stream s) {
  const std::int64_t slots = c.range.extent[0], heads = kv.kv_heads, places = c.range.extent[2];
  if (!c.code || !c.range || c.code.extent != std::array{slots, heads, places, std::int64_t{kv.head_dim} / 2} ||
      c.range.extent != std::array{slots, heads, places, std::int64_t{2}} || c.code.stride[3] != 1 ||
      c.range.stride[3] != 1)
    fail(Errc::internal, op, "got codes of another shape, wanted those of this cache's KV heads");
  if (kv.rope == RopeRegime::cache_relative)
    fail(Errc::unsupported, op, "got keys before RoPE (cache_relative), wanted keys that are stored as rotated");
  if (s.device() == Device::cpu && longest(kv) > places)
    fail(Errc::internal, op,
         "got codes with room for " + std::to_string(places) + " tokens, wanted " + std::to_string(longest(kv)));
}

void code_key(const float* x, int dim, std::uint8_t* code, float* range) {
  float least = INFINITY, greatest = -INFINITY;
  for (int d = 0; d < dim; ++d) least = std::fmin(least, x[d]), greatest = std::fmax(greatest, x[d]);
  const float scale = key_code_scale(least, greatest);
  for (int d = 0; d < dim; d += 2)
    code[d / 2] = static_cast<std::uint8_t>(key_code(x[d], least, scale) | key_code(x[d + 1], least, scale) << 4);
  range[0] = least <= greatest ? least : 0.f, range[1] = scale;
}

void dot_head(const PagedKv& kv, int row, int head, const View<const float, 3>& vectors, const PageList& pages,
              const KeyCodes& c, const Scores& out) {
  const RowKernels& kernels = row_kernels();
  const int dim = kv.head_dim, group = static_cast<int>(vectors.extent[1]) / kv.kv_heads, n = kv.tokens(row, head);
  const std::int64_t slot = kv.slots[row], at = pages.at(row);
  thread_local std::vector<float> rows, panel, dots;
  rows.resize(static_cast<std::size_t>(dim) * panel_width), panel.resize(rows.size());
  dots.resize(static_cast<std::size_t>(group) * panel_width);
  for (int i = 0; i < pages.count(at, head); ++i) {
    const int first = pages.index(at, head, i) * kv.page_size, end = std::min(n, first + kv.page_size);
    for (int t = first; t < end; t += panel_width) {
      const int count = std::min(panel_width, end - t);
      for (int j = 0; j < count; ++j) {
        const std::uint8_t* code = &c.code(slot, head, t + j, 0);
        const float least = c.range(slot, head, t + j, 0), scale = c.range(slot, head, t + j, 1);
        float* x = rows.data() + j * dim;
        for (int d = 0; d < dim; d += 2) {
          x[d] = least + scale * static_cast<float>(code[d / 2] & 15);
          x[d + 1] = least + scale * static_cast<float>(code[d / 2] >> 4);
        }
      }
      kernels.pack_panel(rows.data(), count, dim, panel.data());
      kernels.panel_dot(panel.data(), dim, &vectors(row, head * group, 0), vectors.stride[1], group, dots.data(),
                        panel_width);
      for (int g = 0; g < group; ++g)
        std::copy_n(dots.data() + g * panel_width, count, &out(row, head * group + g, i * kv.page_size + t - first));
    }
    for (int g = 0; g < group; ++g)
      for (int t = end; t < first + kv.page_size; ++t)
        out(row, head * group + g, i * kv.page_size + t - first) = -INFINITY;
  }
}

}  // namespace

void code_keys(const PagedKv& kv, int newest, const KeyCodes& codes, Stream s) {
  const char* op = "code_keys";
  check_kv(kv, op, s);
  check_codes(kv, codes, op, s);
  check_newest(newest, op);
  if (s.device() == Device::cuda) return on_cuda<code_keys>(kv, newest, codes, s);
  for_newest_keys(kv, newest, kv.head_dim, op, [&](int r, int h, int t, const float* key) {
    code_key(key, kv.head_dim, &codes.code(kv.slots[r], h, t, 0), &codes.range(kv.slots[r], h, t, 0));
  });
}

void coded_row_dot(const PagedKv& kv, View<const float, 3> vectors, const PageList& pages, const KeyCodes& codes,
                   Scores out, Stream s) {
  const char* op = "coded_row_dot";
  check_kv(kv, op, s);
  check_codes(kv, codes, op, s);
  check_list(kv, pages, op);
  run_put_off();  // it may write the list
  if (!out || out.extent[0] < kv.rows || out.extent[1] % kv.kv_heads || out.stride[2] != 1 ||
      vectors.extent[0] < kv.rows || vectors.extent[1] != out.extent[1] || vectors.extent[2] != kv.head_dim ||
      vectors.stride[2] != 1)
    fail(Errc::internal, op, "got vectors or an output of another shape, wanted [row, head, ...] of the same heads");
  if (s.device() == Device::cuda) return on_cuda<coded_row_dot>(kv, vectors, pages, codes, out, s);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int count = pages.count(pages.at(r), h);
      if (count * kv.page_size > out.extent[2])
        fail(Errc::internal, op,
             "got room for " + std::to_string(out.extent[2]) + " candidates, wanted " +
                 std::to_string(count * kv.page_size));
      for (int i = 0; i < count; ++i)
        if (const int page = pages.index(pages.at(r), h, i); page < 0 || page >= kv.pages(r, h))
          fail(Errc::internal, op,
               "got page " + std::to_string(page) + " in a list, wanted one of " + std::to_string(kv.pages(r, h)));
    }
#pragma omp parallel for collapse(2) schedule(dynamic) if (worth_threads(kv.rows * out.extent[1] * out.extent[2]))
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) dot_head(kv, r, h, vectors, pages, codes, out);
}

}  // namespace kvlab::ops
