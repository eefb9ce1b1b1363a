// Hooks that want nothing: the full cache.
#pragma once
#include "exec/executor.hpp"

namespace kvlab::test {

struct NullHooks final : LayerHooks {};

}  // namespace kvlab::test
