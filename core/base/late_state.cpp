#include "base/late_state.hpp"

namespace kvlab::detail {

thread_local LateState* late_state = nullptr;

}  // namespace kvlab::detail
