#include "ops/page/causal.hpp"

#include "base/device_op.hpp"
#include "base/stream_memory.hpp"

namespace kvlab::ops {

void causal(const std::int32_t* now, int kv_heads, int tokens, std::int32_t* length, std::int32_t* row, Stream s) {
  if (s.device() == Device::cuda) return on_cuda<causal>(now, kv_heads, tokens, length, row, s);
  for (int t = 0; t < tokens; ++t) {
    row[t] = t;
    for (int head = 0; head < kv_heads; ++head) length[t * kv_heads + head] = now[head] - tokens + t + 1;
  }
}

// list: index of one row, count of each row. A row's last page may be one that the list ends before.
void count_causal_pages(const PageList& list, const PagedKv& rows, Stream s) {
  if (s.device() == Device::cuda) return on_cuda<count_causal_pages>(list, rows, s);
  for (int r = 0; r < rows.rows; ++r)
    for (int h = 0; h < rows.kv_heads; ++h) {
      std::int32_t n = list.count(rows.rows, h);
      while (n > 0 && list.index(r, h, n - 1) >= rows.pages(r, h)) --n;
      list.count(r, h) = n;
    }
}

PageList causal_pages(PageList list, std::int64_t slot, const PagedKv& rows, std::int32_t* counts, Stream s) {
  const std::int64_t at = list.slots ? slot : 0;
  list.index.data += at * list.index.stride[0];
  copy_memory(counts + std::int64_t{rows.rows} * rows.kv_heads, list.count.data + at * list.count.stride[0],
              static_cast<std::size_t>(rows.kv_heads) * sizeof(std::int32_t), s);
  list.index.extent[0] = rows.rows, list.index.stride[0] = 0;
  list.count = View<std::int32_t, 2>::dense(counts, {rows.rows, rows.kv_heads});
  list.slots = nullptr, list.final = nullptr;
  count_causal_pages(list, rows, s);
  return list;
}

}  // namespace kvlab::ops
