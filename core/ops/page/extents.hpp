// Extents of a view in a message: "[1, 2, 64]".
#pragma once
#include <kvlab/view.hpp>

#include <cstdint>
#include <string>

namespace kvlab::ops {

template <class T, int n>
std::string extents(const View<T, n>& x) {
  std::string out;
  for (const std::int64_t e : x.extent) out += (out.empty() ? "[" : ", ") + std::to_string(e);
  return out + "]";
}

}  // namespace kvlab::ops
