#include <kvlab/ops.hpp>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "base/device_op.hpp"
#include "base/put_off.hpp"
#include "ops/page/check.hpp"
#include "ops/score/turned.hpp"

namespace kvlab::ops {
namespace {

thread_local std::optional<PutOffTurns> waiting;

void find_waiting() {
  const PutOffTurns& t = *waiting;
  on_cuda<turned_heads>(t.queries, t.kv, t.last, t.threshold, t.turned, t.stream);
}

}  // namespace

const PutOffTurns* put_off_turns() { return is_put_off(find_waiting) ? &*waiting : nullptr; }

void turned_heads(const Tensor<3>& queries, const PagedKv& kv, View<float, 3> last, float threshold, HeadFlags turned,
                  Stream s) {
  const char* op = "turned_heads";
  check_kv(kv, op, s);
  const View<const float, 3> q = queries.f32();
  if (queries.dtype != DType::f32 || q.extent[0] < kv.rows || q.extent[1] % kv.kv_heads || q.extent[2] != kv.head_dim ||
      q.stride[2] != 1)
    fail(Errc::internal, op, "got queries of another shape, wanted f32 [row, query head, head_dim]");
  if (last.extent[1] < q.extent[1] || last.extent[2] != kv.head_dim || last.stride[2] != 1)
    fail(Errc::internal, op, "got kept queries of another shape, wanted [slot, query head, head_dim]");
  if (turned.extent[0] != last.extent[0] || turned.extent[1] < kv.kv_heads)
    fail(Errc::internal, op, "got too few flags, wanted [slot, kv_head]");
  const InjectedTurns* injected = kv.injected ? kv.injected->turns : nullptr;
  if (injected) kv.injected->used->turns = true;
  if (s.device() == Device::cuda) {
    run_put_off();
    if (kv.injected || !may_put_off()) return on_cuda<turned_heads>(queries, kv, last, threshold, turned, s);
    waiting = {queries, kv, last, threshold, turned, s};
    return put_off(find_waiting);
  }
  const int heads = static_cast<int>(q.extent[1]), group = heads / kv.kv_heads, dim = kv.head_dim;
  for (int r = 0; r < kv.rows; ++r) {
    const std::uint32_t call = injected ? injected->calls(kv.slots[r])++ : 0;
    for (int h = 0; h < kv.kv_heads; ++h) {
      float sum = 0;
      for (int g = h * group; g < (h + 1) * group; ++g) {
        const float* now = &q(r, g, 0);
        float* then = &last(kv.slots[r], g, 0);
        float dot = 0, a = 0, b = 0;
        for (int d = 0; d < dim; ++d) dot += now[d] * then[d], a += now[d] * now[d], b += then[d] * then[d];
        sum +=
            injected && b > 0 ? injected->cosine(kv.slots[r], h, call) : dot / (std::sqrt(a) * std::sqrt(b) + 1e-12f);
        std::copy_n(now, dim, then);
      }
      turned(kv.slots[r], h) = sum / static_cast<float>(group) < threshold;
    }
  }
}

}  // namespace kvlab::ops
