#include <kvlab/rings.hpp>

#include <algorithm>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"

namespace kvlab::ops {

void put_in_rings(const PagedKv& kv, View<const float, 3> rows, const std::int32_t* place, View<float, 4> ring,
                  Stream s) {
  const char* op = "put_in_rings";
  check_kv(kv, op, s);
  if (rows.extent[0] < kv.rows || rows.extent[1] > ring.extent[1] || rows.extent[2] != ring.extent[3])
    fail(Errc::internal, op, "got fewer rows than the cache has, or vectors of another shape than the ring's");
  if (s.device() == Device::cuda) return on_cuda<put_in_rings>(kv, rows, place, ring, s);
  for (int r = 0; r < kv.rows; ++r)
    for (std::int64_t h = 0; h < rows.extent[1]; ++h)
      std::copy_n(&rows(r, h, 0), rows.extent[2], &ring(kv.slots[r], h, place[r], 0));
}

}  // namespace kvlab::ops
