// What the two forms of prefill_attention share.
#pragma once
#include "ops/attend.hpp"

namespace kvlab::ops {

void check_prefill(const PrefillArgs& a, const char* op);  // shapes and strides; Errc::internal or unsupported
float prefill_scale(const PrefillArgs& a);                 // softmax_scale, or its default

}  // namespace kvlab::ops
