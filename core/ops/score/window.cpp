#include <kvlab/ops.hpp>

#include <algorithm>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"

namespace kvlab::ops {

void keep_window(const Tensor<3>& queries, const PagedKv& kv, View<float, 4> kept, View<float, 4> window, Stream s,
                 const Heads& heads) {
  const char* op = "keep_window";
  check_kv(kv, op, s);
  const View<const float, 3> q = queries.f32();
  if (queries.dtype != DType::f32 || q.extent[0] < kv.rows || q.extent[1] % kv.kv_heads || q.extent[2] != kv.head_dim ||
      q.stride[2] != 1)
    fail(Errc::internal, op, "got queries of another shape, wanted f32 [row, query head, head_dim]");
  const std::int64_t group = q.extent[1] / kv.kv_heads, count = kept.extent[2], dim = kv.head_dim;
  if (kept.extent[1] < kv.kv_heads || count < group || count % group || kept.extent[3] != dim || kept.stride[3] != 1)
    fail(Errc::internal, op, "got kept queries of another shape, wanted [slot, kv_head, steps x group, head_dim]");
  if (window && (window.extent[0] < kv.rows || window.extent[1] != kv.kv_heads * count || window.extent[2] != 1 ||
                 window.extent[3] != dim || window.stride[3] != 1))
    fail(Errc::internal, op, "got a window of another shape, wanted [row, kv_head x steps x group, 1, head_dim]");
  if (s.device() == Device::cuda) return on_cuda<keep_window>(queries, kv, kept, window, s, heads);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int slot = kv.slots[r];
      if (!heads.on(slot, h)) continue;
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t later = i + group, own = h * group + later - count;
        std::copy_n(later < count ? &kept(slot, h, later, 0) : &q(r, own, 0), dim, &kept(slot, h, i, 0));
        if (window) std::copy_n(&kept(slot, h, i, 0), dim, &window(r, h * count + i, 0, 0));
      }
    }
}

}  // namespace kvlab::ops
