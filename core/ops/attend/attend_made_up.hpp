// Made-up tokens join the attention of a decode step (Edits::read_made_up).
#pragma once
#include "ops/attend/attend.hpp"

namespace kvlab::ops {

// a: the arguments of an attend call that has run, with lse. `out`, `rounded` and lse become those of an attention that
// also read the made-up tokens of the rows' slots. Token i of weight w has the logit q . key_i * softmax_scale + ln w.
// A weight that is not above 0 counts as 0. Errc::internal: no lse, or made-up tokens of another shape.
// Errc::unsupported: head_dim strided. Bytes: the tokens once for each query head, out twice.
void attend_made_up(const AttendArgs& a, const MadeUpTokens& tokens, Stream s);
void attend_made_up_reference(const AttendArgs& a, const MadeUpTokens& tokens);

}  // namespace kvlab::ops
