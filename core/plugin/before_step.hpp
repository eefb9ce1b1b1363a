// Tells a policy of core's own of a decode step before it begins. A graph that replays the step runs no callback, so
// numbers that follow the text's length must lie on the device by then.
#pragma once
#include <kvlab/stream.hpp>

#include <cstdint>
#include <span>

namespace kvlab {

class BeforeStep {
 public:
  virtual ~BeforeStep() = default;
  // position, step: as in LayerKv in the step's callbacks, [row] host memory. What it copies is in the stream's order.
  // Returns the step's variant. Steps of one variant and as many rows give the stream the same work. So a graph holds
  // one of them.
  virtual int before_step(std::span<const std::int32_t> position, std::span<const std::int32_t> step, Stream s) = 0;
};

}  // namespace kvlab
