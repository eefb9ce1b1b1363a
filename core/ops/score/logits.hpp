// Limits of pooled_logits.
#pragma once

namespace kvlab::ops {

inline constexpr int most_logit_kernel = 1023, most_logit_group = 64;

}  // namespace kvlab::ops
