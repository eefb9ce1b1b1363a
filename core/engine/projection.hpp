// Gives a policy's callback the norms of projected values (LayerKv::projected_norms), by the executor's product.
#pragma once
#include <kvlab/policy.hpp>

#include <cstdint>

#include "exec/executor.hpp"

namespace kvlab {

class Projection final : public OutputProjection {
 public:
  explicit Projection(Executor& executor) : executor_(executor) {}  // borrowed
  // Scratch that a call takes.
  static std::int64_t scratch_bytes(const Shape& shape, int hidden);

  void norms(const LayerKv& kv, Scores out, Stream s) const override;

 private:
  Executor& executor_;
};

}  // namespace kvlab
