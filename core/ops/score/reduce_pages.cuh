// The launcher of page_score calls this function of score.cu.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>

namespace kvlab::ops {

// Runs group_reduce over pages: an entry is a page. softmax_mean takes the softmax of scale * in.
void reduce_pages_cuda(const PagedKv& kv, const View<const float, 3>& in, GroupRule rule, float scale,
                       const Scores& out, Stream s);

}  // namespace kvlab::ops
