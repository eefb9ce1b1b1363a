// add_mass on CUDA, which score.cu defines. Attention calls it too.
#pragma once
#include <kvlab/ops.hpp>

namespace kvlab::ops {

void add_mass_cuda(View<const float, 3> mass, GroupRule rule, const StateColumn& column, Stream s,
                   const Heads& heads = {});

}  // namespace kvlab::ops
