// The op zero_channels, its kernel and its checks share the order of channels.
#pragma once
#include <kvlab/rewrite.hpp>

#include "base/on_both.hpp"

namespace kvlab::ops {

// Whether channel i of energy a goes before channel j of energy b.
KVLAB_ON_BOTH inline bool goes_first(float a, int i, float b, int j) {
  if (a != a || b != b) return a != a && (b == b || i > j);
  return a < b || (a == b && i > j);
}

// Errc::internal or unsupported. The lengths are known on the CPU alone.
void check_rows(const PagedKv& kv, const View<const float, 4>& rows, const char* op, Stream s);
void check_range(const PagedKv& kv, const RowRange& range, const char* op);

}  // namespace kvlab::ops
