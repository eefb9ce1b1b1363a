// Gives a policy's callback the queries that the next layer would have (LayerStep::next_queries), by the executor.
#pragma once
#include <kvlab/error.hpp>
#include <kvlab/policy.hpp>

#include <array>
#include <cstdint>
#include <string>

#include "exec/executor.hpp"

namespace kvlab {

class NextQueries final : public QueriesAhead {
 public:
  explicit NextQueries(Executor& executor) : executor_(executor) {}  // borrowed

  void of(const LayerStep& step, View<float, 3> out, Stream) const override {
    const Shape& s = *step.shape;
    if (step.layer + 1 >= s.layers)
      throw Error(Errc::plugin, "got next_queries() in layer " + std::to_string(step.layer) +
                                    ", the last one, wanted it where a layer follows");
    const std::array<std::int64_t, 3> wanted{step.rows(), s.query_heads, s.head_dim};
    if (out.extent != wanted || out.stride != View<float, 3>::dense(out.data, wanted).stride)
      throw Error(Errc::plugin, "got another shape for next_queries(), wanted [row, query head, head_dim], dense");
    executor_.queries_ahead(step.layer, step.rows(), out.data);
  }

 private:
  Executor& executor_;
};

}  // namespace kvlab
