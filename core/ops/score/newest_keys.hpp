// The newest keys of every row's heads on the CPU, for ops that copy them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>

#include "base/per_thread.hpp"
#include "ops/page/check.hpp"
#include "ops/page/paged.hpp"

namespace kvlab::ops {

inline void check_newest(int newest, const char* op) {
  if (newest < 0) fail(Errc::internal, op, "got " + std::to_string(newest) + " newest tokens, wanted 0 or more");
}

// Calls f(row, head, place, key) for each of the `newest` last places of every row's heads, on several threads where
// `products` of a key make them worth it. key: [head_dim] f32. A page that is not there is Errc::internal.
template <class F>
void for_newest_keys(const PagedKv& kv, int newest, std::int64_t products, const char* op, const F& f) {
  PerThread<float> keys(static_cast<std::size_t>(kv.head_dim));
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int n = kv.tokens(r, h), first = n - std::min(n, newest);
      for (int page = first / kv.page_size; page * kv.page_size < n; ++page) check_page(kv, r, h, page, op);
#pragma omp parallel if (worth_threads((n - first) * products))
      {
        const auto key = keys.own();
#pragma omp for schedule(static)
        for (int t = first; t < n; ++t) {
          const PageEntry& e = kv.entry(r, h, t / kv.page_size);
          read_row(kv.frame(e), kv.layout(e), KvSide::key, t % kv.page_size, key.data());
          f(r, h, t, key.data());
        }
      }
    }
}

}  // namespace kvlab::ops
