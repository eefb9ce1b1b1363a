// Numbers of page summaries in codes (summary_bytes in kvlab/kv.hpp), in CPU code and in kernels.
#pragma once

namespace kvlab::ops {

inline constexpr float summary_limit = 0x1p100f;         // numbers count as within +-this
inline constexpr float summary_step = 0x1.010108p-8f;    // of most - least, between neighbouring codes
inline constexpr float least_summary_scale = 0x1p-126f;  // the least normal number: its inverse is finite

}  // namespace kvlab::ops
