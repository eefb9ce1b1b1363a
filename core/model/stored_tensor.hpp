// A tensor as a weight file stores it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "model/quants.hpp"

namespace kvlab {

struct StoredTensor {
  std::vector<std::int64_t> shape;  // row-major: the last is the contiguous one; a scalar is [1]
  StoredType type = StoredType::f32;
  const std::byte* data = nullptr;  // in the mapped file

  std::int64_t columns() const { return shape.back(); }
  std::int64_t rows() const {
    std::int64_t n = 1;
    for (std::size_t i = 0; i + 1 < shape.size(); ++i) n *= shape[i];
    return n;
  }
};

}  // namespace kvlab
