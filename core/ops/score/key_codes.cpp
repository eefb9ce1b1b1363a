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
  const float scale = range_step(least, greatest, key_code_bits);
  const auto code_of = [&](float y) { return range_code(y, least, scale, key_code_bits); };
  for (int d = 0; d < dim; d += 2) code[d / 2] = static_cast<std::uint8_t>(code_of(x[d]) | code_of(x[d + 1]) << 4);
  range[0] = least <= greatest ? least : 0.f, range[1] = scale;
}

void dot_head(const PagedKv& kv, int row, int head, const View<const float, 3>& vectors, const IndexList& list,
              int unit, const KeyCodes& c, const Scores& out) {
  const RowKernels& kernels = row_kernels();
  const int dim = kv.head_dim, group = static_cast<int>(vectors.extent[1]) / kv.kv_heads, n = kv.tokens(row, head),
            candidates = list.count(list.at(row), head) * unit;
  const std::int64_t slot = kv.slots[row], at = list.at(row);
  thread_local std::vector<float> rows, panel, dots;
  rows.resize(static_cast<std::size_t>(dim) * panel_width), panel.resize(rows.size());
  dots.resize(static_cast<std::size_t>(group) * panel_width);
  for (int first = 0; first < candidates; first += panel_width) {
    const int count = std::min(panel_width, candidates - first);
    const auto place = [&](int j) { return list.index(at, head, (first + j) / unit) * unit + (first + j) % unit; };
    for (int j = 0; j < count; ++j) {
      float* x = rows.data() + j * dim;
      const int t = place(j);
      if (t >= n) {
        std::fill_n(x, dim, 0.f);
        continue;
      }
      const std::uint8_t* code = &c.code(slot, head, t, 0);
      const float least = c.range(slot, head, t, 0), scale = c.range(slot, head, t, 1);
      for (int d = 0; d < dim; d += 2) {
        x[d] = least + scale * static_cast<float>(code[d / 2] & 15);
        x[d + 1] = least + scale * static_cast<float>(code[d / 2] >> 4);
      }
    }
    kernels.pack_panel(rows.data(), count, dim, panel.data());
    kernels.panel_dot(panel.data(), dim, &vectors(row, head * group, 0), vectors.stride[1], group, dots.data(),
                      panel_width);
    for (int g = 0; g < group; ++g)
      for (int j = 0; j < count; ++j)
        out(row, head * group + g, first + j) =
            place(j) < n ? dots[static_cast<std::size_t>(g * panel_width + j)] : -INFINITY;
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

void coded_entry_dot(const PagedKv& kv, View<const float, 3> vectors, const IndexList& list, int unit,
                     const KeyCodes& codes, Scores out, Stream s) {
  const char* op = "coded_row_dot";
  check_kv(kv, op, s);
  check_codes(kv, codes, op, s);
  check_list(kv, list, op);
  run_put_off();  // it may write the list
  if (!out || out.extent[0] < kv.rows || out.extent[1] % kv.kv_heads || out.stride[2] != 1 ||
      vectors.extent[0] < kv.rows || vectors.extent[1] != out.extent[1] || vectors.extent[2] != kv.head_dim ||
      vectors.stride[2] != 1)
    fail(Errc::internal, op, "got vectors or an output of another shape, wanted [row, head, ...] of the same heads");
  if (s.device() == Device::cuda) return on_cuda<coded_entry_dot>(kv, vectors, list, unit, codes, out, s);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int count = list.count(list.at(r), h), all = (kv.tokens(r, h) + unit - 1) / unit;
      if (count * unit > out.extent[2])
        fail(Errc::internal, op,
             "got room for " + std::to_string(out.extent[2]) + " candidates, wanted " + std::to_string(count * unit));
      for (int i = 0; i < count; ++i)
        if (const int entry = list.index(list.at(r), h, i); entry < 0 || entry >= all)
          fail(Errc::internal, op,
               std::string(unit > 1 ? "got page " : "got token ") + std::to_string(entry) +
                   " in a list, wanted one of " + std::to_string(all));
    }
#pragma omp parallel for collapse(2) schedule(dynamic) if (worth_threads(kv.rows * out.extent[1] * out.extent[2]))
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) dot_head(kv, r, h, vectors, list, unit, codes, out);
}

void coded_row_dot(const PagedKv& kv, View<const float, 3> vectors, const PageList& pages, const KeyCodes& codes,
                   Scores out, Stream s) {
  coded_entry_dot(kv, vectors, pages, kv.page_size, codes, out, s);
}

void coded_row_dot(const PagedKv& kv, View<const float, 3> vectors, const TokenList& tokens, const KeyCodes& codes,
                   Scores out, Stream s) {
  coded_entry_dot(kv, vectors, tokens, 1, codes, out, s);
}

}  // namespace kvlab::ops
